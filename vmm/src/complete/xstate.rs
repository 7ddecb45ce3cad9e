//! XSAVE and XRSTOR in the standard form on images of the extended state (Intel SDM
//! volume 1, chapter 13): x87, SSE, AVX, the three components of AVX-512, and PKRU.
//!
//! User code runs on the real CPU and uses whatever that has, so every component that a
//! guest's kernel can enable is handled; where each lies differs between CPU makers and
//! is asked of CPUID.
//!
//! `XstateImage` is what `KVM_GET_XSAVE` gives: an XSAVE area in which components that are
//! in their initial configuration may hold anything.

use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Length of the legacy region and the header, which every area has.
const LEGACY_AND_HEADER_BYTES: usize = 576;
/// Longest area that is handled: all of the components above on any CPU.
pub(super) const AREA_BYTES_MAX: usize = 2696;
/// Length of `kvm_xsave.region`.
const IMAGE_BYTES: usize = 4096;

const X87: u64 = 1;
const SSE: u64 = 2;
const AVX: u64 = 4;
/// Components with a place of their own: AVX, opmask, upper halves of ZMM0–15,
/// ZMM16–31, PKRU.
const EXTENDED: [u32; 5] = [2, 5, 6, 7, 9];

const X87_CONTROL: std::ops::Range<usize> = 0..24;
const X87_REGISTERS: std::ops::Range<usize> = 32..160;
const MXCSR: std::ops::Range<usize> = 24..28;
const MXCSR_AND_MASK: std::ops::Range<usize> = 24..32;
const SSE_REGISTERS: std::ops::Range<usize> = 160..416;
const XSTATE_BV: std::ops::Range<usize> = 512..520;
const XCOMP_BV: std::ops::Range<usize> = 520..528;

/// Value of MXCSR after reset.
const MXCSR_INITIAL: u32 = 0x1f80;
/// Bits of MXCSR that may be set (with MXCSR.MM of AMD).
const MXCSR_VALID: u32 = 0x2_ffff;
/// x87 control word after FNINIT.
const X87_CONTROL_INITIAL: [u8; 2] = [0x7f, 0x03];

/// Where the CPU keeps each extended component: its bit and its bytes in the area.
#[derive(Debug, Clone)]
pub(super) struct Layout(Vec<(u64, std::ops::Range<usize>)>);

impl Layout {
    /// The layout of this CPU, asked once.
    pub(super) fn of_cpu() -> &'static Self {
        static LAYOUT: OnceLock<Layout> = OnceLock::new();
        LAYOUT.get_or_init(|| {
            let places = EXTENDED.iter().filter_map(|component| {
                let leaf = __cpuid_count(0xd, *component);
                let start = usize::try_from(leaf.ebx).ok()?;
                let end = start + usize::try_from(leaf.eax).ok()?;
                let exists = start >= LEGACY_AND_HEADER_BYTES && end > start;
                (exists && end <= AREA_BYTES_MAX).then_some((1 << component, start..end))
            });
            Self(places.collect())
        })
    }

    /// Those of `requested`, with their bytes.
    fn requested(&self, requested: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let places = self.0.iter().filter(move |(component, _)| requested & component != 0);
        places.cloned()
    }

    /// Bytes of memory that XSAVE or XRSTOR touches for `requested` components.
    pub(super) fn area_length(&self, requested: u64) -> usize {
        self.requested(requested)
            .map(|(_, range)| range.end)
            .fold(LEGACY_AND_HEADER_BYTES, usize::max)
    }

    /// SSE and the extended components of `requested`, with their bytes.
    fn vectors(&self, requested: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let sse = (requested & SSE != 0).then_some((SSE, SSE_REGISTERS));
        sse.into_iter().chain(self.requested(requested))
    }
}

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
pub(super) fn save(
    layout: &Layout,
    state: &XstateImage,
    requested: u64,
    area: &mut [u8; AREA_BYTES_MAX],
) {
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
    for (component, range) in layout.vectors(requested) {
        if used & component != 0 {
            area[range.clone()].copy_from_slice(&source[range]);
        } else {
            area[range].fill(0);
        }
    }
    let kept = word(&area[XSTATE_BV]) & !requested;
    area[XSTATE_BV].copy_from_slice(&(kept | (used & requested)).to_le_bytes());
}

/// XRSTOR: loads `requested` components (already cut by XCR0) from `area`.
pub(super) fn restore(
    layout: &Layout,
    state: &mut XstateImage,
    requested: u64,
    xcr0: u64,
    area: &[u8; AREA_BYTES_MAX],
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
    for (component, range) in layout.vectors(requested) {
        if loaded & component != 0 {
            target[range.clone()].copy_from_slice(&area[range]);
        } else {
            target[range].fill(0);
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
