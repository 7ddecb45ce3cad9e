//! The rules against the CPU itself: random states, saved and restored by the real
//! instructions and by ours.

use std::arch::asm;

use warren_base::skip::skipped;

use super::*;

#[repr(C, align(64))]
struct Area([u8; IMAGE_BYTES]);

impl Area {
    fn zeroed() -> Self {
        Self([0; IMAGE_BYTES])
    }

    fn image(&self) -> XstateImage {
        XstateImage { bytes: Box::new(self.0) }
    }

    fn standard(&self) -> [u8; AREA_BYTES_MAX] {
        self.0[..AREA_BYTES_MAX].try_into().unwrap()
    }
}

/// XRSTOR of `state` with all components, XRSTOR of `area` with `mask`, then XSAVE of
/// all into `after`, with no other use of vector registers in between.
fn cpu_restore(state: &Area, area: &Area, mask: u64, after: &mut Area) {
    let every = every_component();
    // SAFETY: the areas are 64-byte aligned and long enough for x87, SSE and AVX; all
    // registers that XRSTOR changes are declared as clobbered.
    unsafe {
        asm!(
            "mov eax, {every:e}", "xor edx, edx", "xrstor64 [{state}]",
            "mov eax, {mask:e}", "xrstor64 [{area}]",
            "mov eax, {every:e}", "xsave64 [{after}]",
            state = in(reg) state.0.as_ptr(), area = in(reg) area.0.as_ptr(),
            after = in(reg) after.0.as_mut_ptr(), mask = in(reg) mask, every = in(reg) every,
            out("eax") _, out("edx") _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
            clobber_abi("C"),
        );
        asm!("fninit", "ldmxcsr [{initial}]", initial = in(reg) &MXCSR_INITIAL);
    }
}

/// XRSTOR of `state`, then XSAVE of all into `all` and of `mask` into `area`.
fn cpu_save(state: &Area, mask: u64, all: &mut Area, area: &mut Area) {
    let every = every_component();
    // SAFETY: as in `cpu_restore`.
    unsafe {
        asm!(
            "mov eax, {every:e}", "xor edx, edx", "xrstor64 [{state}]",
            "xsave64 [{all}]",
            "mov eax, {mask:e}", "xsave64 [{area}]",
            state = in(reg) state.0.as_ptr(), all = in(reg) all.0.as_mut_ptr(),
            area = in(reg) area.0.as_mut_ptr(), mask = in(reg) mask, every = in(reg) every,
            out("eax") _, out("edx") _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
            clobber_abi("C"),
        );
        asm!("fninit", "ldmxcsr [{initial}]", initial = in(reg) &MXCSR_INITIAL);
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[3]
    }

    /// An area that XRSTOR accepts, with `components` marked as in use.
    fn area(&mut self, components: u64) -> Area {
        let mut area = Area::zeroed();
        let extended = Layout::of_cpu().requested(every_component()).map(|(_, range)| range);
        for range in [X87_REGISTERS, SSE_REGISTERS].into_iter().chain(extended) {
            range.for_each(|index| area.0[index] = self.byte());
        }
        for register in 0..8 {
            area.0[32 + 16 * register + 10..32 + 16 * register + 16].fill(0);
        }
        area.0[..2].copy_from_slice(&X87_CONTROL_INITIAL);
        area.0[3] = self.byte() & 0x47;
        area.0[4] = self.byte();
        let mxcsr = 0x1f80 | ((self.next() & 7) << 13) | (self.next() & 0x3f);
        area.0[MXCSR].copy_from_slice(&mxcsr.to_le_bytes()[..4]);
        area.0[28..32].copy_from_slice(&0x2_ffffu32.to_le_bytes());
        area.0[XSTATE_BV].copy_from_slice(&components.to_le_bytes());
        area
    }
}

/// Components that this CPU and its kernel let user code use, of those handled here.
/// PKRU is left out: the test would lock itself out of its own memory.
fn every_component() -> u64 {
    const PKRU: u64 = 1 << 9;
    // SAFETY: the callers have checked that the CPU has XSAVE.
    let enabled = unsafe { xcr0() };
    let handled = Layout::of_cpu().0.iter().fold(X87 | SSE, |all, (component, _)| all | component);
    enabled & handled & !PKRU
}

#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: the caller guarantees XSAVE, and register 0 always exists.
    unsafe { std::arch::x86_64::_xgetbv(0) }
}

/// True if the CPU has what the test executes; printed when it has not.
fn cpu_has_avx() -> bool {
    let has = std::is_x86_feature_detected!("avx") && std::is_x86_feature_detected!("xsave");
    if !has {
        skipped("this CPU has no AVX or no XSAVE");
    }
    has
}

#[test]
fn save_equals_the_cpu() {
    if !cpu_has_avx() {
        return;
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for round in 0..20_000 {
        let components = random.next() & every_component();
        let state = random.area(components);
        let old = random.next() & every_component();
        let memory = random.area(old);
        let mask = random.next() & every_component();
        let mut all = Area::zeroed();
        let mut by_cpu = Area(memory.0);
        cpu_save(&state, mask, &mut all, &mut by_cpu);
        let mut by_us = memory.standard();
        save(Layout::of_cpu(), &all.image(), mask, &mut by_us);
        let length = Layout::of_cpu().area_length(mask);
        assert!(
            by_us[..512] == by_cpu.0[..512] && by_us[520..length] == by_cpu.0[520..length],
            "round {round}, mask {mask}"
        );
        // Whether a component in its initial configuration counts as in use is up to the
        // CPU, and may change at any interrupt between its two XSAVEs.
        let differing = word(&by_us[XSTATE_BV]) ^ word(&by_cpu.0[XSTATE_BV]);
        assert_eq!(differing & !mask, 0, "round {round}, mask {mask}");
        for (component, range) in Layout::of_cpu().vectors(differing) {
            let initial = by_us[range].iter().all(|byte| *byte == 0);
            assert!(initial, "round {round}, mask {mask}, component {component}");
        }
    }
}

#[test]
fn restore_equals_the_cpu() {
    if !cpu_has_avx() {
        return;
    }
    let mut random = Random(0xd1b5_4a32_d192_ed03);
    for round in 0..20_000 {
        let components = random.next() & every_component();
        let state = random.area(components);
        let stored = random.next() & every_component();
        let memory = random.area(stored);
        let mask = random.next() & every_component();
        let mut before = Area::zeroed();
        cpu_save(&state, 0, &mut before, &mut Area::zeroed());
        let mut by_cpu = Area::zeroed();
        cpu_restore(&state, &memory, mask, &mut by_cpu);
        let mut image = before.image();
        let layout = Layout::of_cpu();
        restore(layout, &mut image, mask, every_component(), &memory.standard()).unwrap();
        // As the CPU would store our image: initial components read as zero.
        let mut by_us = [0; AREA_BYTES_MAX];
        save(layout, &image, every_component(), &mut by_us);
        assert!(by_us[..512] == by_cpu.0[..512], "round {round}, mask {mask}");
        for (component, range) in layout.requested(every_component()) {
            let (ours, cpu) = (&by_us[range.clone()], &by_cpu.0[range]);
            assert!(ours == cpu, "round {round}, mask {mask}, component {component}");
        }
    }
}

#[test]
fn restore_of_a_bad_header_is_a_protection_fault() {
    let mut random = Random(7);
    let mut area = random.area(7).standard();
    area[XSTATE_BV.start + 1] = 1;
    let mut image = Area::zeroed().image();
    assert_eq!(restore(Layout::of_cpu(), &mut image, 7, 7, &area), Err(GeneralProtection));

    let mut area = random.area(7).standard();
    area[XCOMP_BV.end - 1] = 0x80;
    assert_eq!(restore(Layout::of_cpu(), &mut image, 7, 7, &area), Err(GeneralProtection));

    let mut area = random.area(7).standard();
    area[MXCSR].copy_from_slice(&0xffff_ffffu32.to_le_bytes());
    assert_eq!(restore(Layout::of_cpu(), &mut image, 7, 7, &area), Err(GeneralProtection));
}
