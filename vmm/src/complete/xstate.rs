//! XSAVE and XRSTOR in the standard form on images of the extended state (Intel SDM
//! volume 1, chapter 13), for the components x87, SSE and AVX.
//!
//! `XstateImage` is what `KVM_GET_XSAVE` gives: an XSAVE area in which components that are
//! in their initial configuration may hold anything.

/// Length of the standard area for x87, SSE and AVX.
pub(super) const STANDARD_AREA_BYTES: usize = 832;
/// Length without AVX: legacy region and header.
const LEGACY_AND_HEADER_BYTES: usize = 576;
/// Length of `kvm_xsave.region`.
const IMAGE_BYTES: usize = 4096;

const X87: u64 = 1;
const SSE: u64 = 2;
const AVX: u64 = 4;

const X87_CONTROL: std::ops::Range<usize> = 0..24;
const X87_REGISTERS: std::ops::Range<usize> = 32..160;
const MXCSR: std::ops::Range<usize> = 24..28;
const MXCSR_AND_MASK: std::ops::Range<usize> = 24..32;
const SSE_REGISTERS: std::ops::Range<usize> = 160..416;
const XSTATE_BV: std::ops::Range<usize> = 512..520;
const XCOMP_BV: std::ops::Range<usize> = 520..528;
const AVX_REGISTERS: std::ops::Range<usize> = 576..832;

/// Value of MXCSR after reset.
const MXCSR_INITIAL: u32 = 0x1f80;
/// Bits of MXCSR that may be set (with MXCSR.MM of AMD).
const MXCSR_VALID: u32 = 0x2_ffff;
/// x87 control word after FNINIT.
const X87_CONTROL_INITIAL: [u8; 2] = [0x7f, 0x03];

/// The instruction raises #GP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GeneralProtection;

/// Extended state of a vCPU as KVM gives it.
pub(super) struct XstateImage {
    bytes: Box<[u8; IMAGE_BYTES]>,
}

impl XstateImage {
    pub(super) fn from_words(words: &[u32; 1024]) -> Self {
        let mut bytes = Box::new([0; IMAGE_BYTES]);
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Self { bytes }
    }

    pub(super) fn to_words(&self) -> [u32; 1024] {
        let mut words = [0; 1024];
        for (word, place) in words.iter_mut().zip(self.bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([place[0], place[1], place[2], place[3]]);
        }
        words
    }
}

/// Components that are not in their initial configuration (XINUSE).
pub(super) fn in_use(state: &XstateImage) -> u64 {
    word(&state.bytes[XSTATE_BV])
}

/// Bytes of memory that XSAVE or XRSTOR touches for `requested` components.
pub(super) fn area_length(requested: u64) -> usize {
    if requested & AVX != 0 { STANDARD_AREA_BYTES } else { LEGACY_AND_HEADER_BYTES }
}

pub(super) fn mxcsr(state: &XstateImage) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&state.bytes[MXCSR]);
    u32::from_le_bytes(bytes)
}

pub(super) fn set_mxcsr(state: &mut XstateImage, value: u32) -> Result<(), GeneralProtection> {
    if value & !MXCSR_VALID != 0 {
        return Err(GeneralProtection);
    }
    state.bytes[MXCSR].copy_from_slice(&value.to_le_bytes());
    mark_mxcsr(state);
    Ok(())
}

/// XSAVE: stores `requested` components (already cut by XCR0) into `area`, which holds
/// what memory held before.
pub(super) fn save(state: &XstateImage, requested: u64, area: &mut [u8; STANDARD_AREA_BYTES]) {
    let source = &state.bytes[..];
    let used = in_use(state);
    if requested & X87 != 0 {
        if used & X87 != 0 {
            area[X87_CONTROL].copy_from_slice(&source[X87_CONTROL]);
            area[X87_REGISTERS].copy_from_slice(&source[X87_REGISTERS]);
        } else {
            initial_x87(area);
        }
    }
    if requested & (SSE | AVX) != 0 {
        area[MXCSR_AND_MASK].copy_from_slice(&source[MXCSR_AND_MASK]);
    }
    for (component, range) in [(SSE, SSE_REGISTERS), (AVX, AVX_REGISTERS)] {
        if requested & component != 0 {
            if used & component != 0 {
                area[range.clone()].copy_from_slice(&source[range]);
            } else {
                area[range].fill(0);
            }
        }
    }
    let kept = word(&area[XSTATE_BV]) & !requested;
    area[XSTATE_BV].copy_from_slice(&(kept | (used & requested)).to_le_bytes());
}

/// XRSTOR: loads `requested` components (already cut by XCR0) from `area`.
pub(super) fn restore(
    state: &mut XstateImage,
    requested: u64,
    xcr0: u64,
    area: &[u8; STANDARD_AREA_BYTES],
) -> Result<(), GeneralProtection> {
    let stored = word(&area[XSTATE_BV]);
    let reserved = area[XCOMP_BV.start..XCOMP_BV.end + 8].iter().any(|byte| *byte != 0);
    let mut mxcsr_bytes = [0; 4];
    mxcsr_bytes.copy_from_slice(&area[MXCSR]);
    let loads_mxcsr = requested & (SSE | AVX) != 0;
    let bad_mxcsr = loads_mxcsr && u32::from_le_bytes(mxcsr_bytes) & !MXCSR_VALID != 0;
    if stored & !xcr0 != 0 || reserved || bad_mxcsr {
        return Err(GeneralProtection);
    }
    let loaded = stored & requested;
    let target = &mut state.bytes[..];
    if requested & X87 != 0 {
        if loaded & X87 != 0 {
            target[X87_CONTROL].copy_from_slice(&area[X87_CONTROL]);
            target[X87_REGISTERS].copy_from_slice(&area[X87_REGISTERS]);
        } else {
            initial_x87(target);
        }
    }
    for (component, range) in [(SSE, SSE_REGISTERS), (AVX, AVX_REGISTERS)] {
        if requested & component != 0 {
            if loaded & component != 0 {
                target[range.clone()].copy_from_slice(&area[range]);
            } else {
                target[range].fill(0);
            }
        }
    }
    if loads_mxcsr {
        target[MXCSR].copy_from_slice(&mxcsr_bytes);
    }
    let kept = word(&target[XSTATE_BV]) & !requested;
    target[XSTATE_BV].copy_from_slice(&(kept | loaded).to_le_bytes());
    target[XCOMP_BV].fill(0);
    mark_mxcsr(state);
    Ok(())
}

/// KVM takes MXCSR over only with SSE or AVX marked as in use.
fn mark_mxcsr(state: &mut XstateImage) {
    if mxcsr(state) != MXCSR_INITIAL {
        let marked = in_use(state) | SSE;
        state.bytes[XSTATE_BV].copy_from_slice(&marked.to_le_bytes());
    }
}

fn initial_x87(area: &mut [u8]) {
    area[X87_CONTROL].fill(0);
    area[..2].copy_from_slice(&X87_CONTROL_INITIAL);
    area[X87_REGISTERS].fill(0);
}

fn word(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(value)
}

#[cfg(test)]
mod tests;
