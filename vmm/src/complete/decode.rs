//! Decoding of the few instructions that are completed (Intel SDM volume 2, chapter 2).

use kvm_bindings::{kvm_regs, kvm_sregs};

/// What the instruction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// FWAIT, EMMS, CLWB: nothing the guest could see here.
    Nothing,
    Breakpoint,
    Xsave,
    Xrstor,
    Xgetbv,
    LoadMxcsr,
    StoreMxcsr,
    StoreStatusWord,
    SetAlignmentCheck,
    ClearAlignmentCheck,
    VerifyForWriting,
    ReadTimestamp,
    PopulationCount {
        destination: u8,
        source: u8,
        wide: bool,
    },
}

/// Segment override that matters in 64-bit mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Segment {
    Flat,
    Fs,
    Gs,
}

/// A memory operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MemoryOperand {
    base: Option<u8>,
    index: Option<(u8, u8)>,
    displacement: i32,
    relative_to_next: bool,
    segment: Segment,
}

/// A decoded instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) operation: Operation,
    pub(super) length: u64,
    operand: Option<MemoryOperand>,
}

impl Instruction {
    /// Linear address of the memory operand; 0 if there is none.
    pub(super) fn address(&self, regs: &kvm_regs, sregs: &kvm_sregs) -> u64 {
        let Some(operand) = self.operand else { return 0 };
        let mut regs = *regs;
        let mut address = match operand.segment {
            Segment::Flat => 0,
            Segment::Fs => sregs.fs.base,
            Segment::Gs => sregs.gs.base,
        };
        if let Some(base) = operand.base {
            address = address.wrapping_add(*register(&mut regs, base));
        }
        if let Some((index, shift)) = operand.index {
            address = address.wrapping_add(*register(&mut regs, index) << shift);
        }
        if operand.relative_to_next {
            address = address.wrapping_add(regs.rip).wrapping_add(self.length);
        }
        address.wrapping_add_signed(operand.displacement.into())
    }
}

/// General register by its number in an instruction.
pub(super) fn register(regs: &mut kvm_regs, number: u8) -> &mut u64 {
    match number & 15 {
        0 => &mut regs.rax,
        1 => &mut regs.rcx,
        2 => &mut regs.rdx,
        3 => &mut regs.rbx,
        4 => &mut regs.rsp,
        5 => &mut regs.rbp,
        6 => &mut regs.rsi,
        7 => &mut regs.rdi,
        8 => &mut regs.r8,
        9 => &mut regs.r9,
        10 => &mut regs.r10,
        11 => &mut regs.r11,
        12 => &mut regs.r12,
        13 => &mut regs.r13,
        14 => &mut regs.r14,
        _ => &mut regs.r15,
    }
}

/// Bytes of the instruction, read from the front.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn displacement8(&mut self) -> Option<i32> {
        Some(i8::from_le_bytes([self.next()?]).into())
    }

    fn displacement32(&mut self) -> Option<i32> {
        Some(i32::from_le_bytes([self.next()?, self.next()?, self.next()?, self.next()?]))
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Prefixes {
    operand_size: bool,
    repeat: bool,
    segment: Option<Segment>,
    rex: u8,
}

impl Prefixes {
    fn wide(self) -> bool {
        self.rex & 8 != 0
    }
    fn extend_reg(self, number: u8) -> u8 {
        number | ((self.rex & 4) << 1)
    }
    fn extend_index(self, number: u8) -> u8 {
        number | ((self.rex & 2) << 2)
    }
    fn extend_base(self, number: u8) -> u8 {
        number | ((self.rex & 1) << 3)
    }
}

/// Decodes one instruction; `None` if it is not one of those completed here.
pub(super) fn decode(bytes: &[u8; 15]) -> Option<Instruction> {
    let mut cursor = Cursor { bytes, at: 0 };
    let prefixes = prefixes(&mut cursor)?;
    let (operation, operand) = match cursor.next()? {
        0x9b => (Operation::Nothing, None),
        0xcc => (Operation::Breakpoint, None),
        0xdf if cursor.next()? == 0xe0 => (Operation::StoreStatusWord, None),
        0x0f => two_byte(&mut cursor, prefixes)?,
        _ => return None,
    };
    let length = u64::try_from(cursor.at).ok()?;
    Some(Instruction { operation, length, operand })
}

fn prefixes(cursor: &mut Cursor<'_>) -> Option<Prefixes> {
    let mut prefixes = Prefixes::default();
    loop {
        match cursor.peek()? {
            0x66 => prefixes.operand_size = true,
            0xf3 => prefixes.repeat = true,
            0x64 => prefixes.segment = Some(Segment::Fs),
            0x65 => prefixes.segment = Some(Segment::Gs),
            0x2e | 0x36 | 0x3e | 0x26 => {}
            rex @ 0x40..=0x4f => {
                cursor.at += 1;
                prefixes.rex = rex;
                return Some(prefixes);
            }
            _ => return Some(prefixes),
        }
        cursor.at += 1;
    }
}

fn two_byte(
    cursor: &mut Cursor<'_>,
    prefixes: Prefixes,
) -> Option<(Operation, Option<MemoryOperand>)> {
    let opcode = cursor.next()?;
    if opcode == 0x77 {
        return Some((Operation::Nothing, None));
    }
    let modrm = cursor.next()?;
    let is_register = modrm >> 6 == 3;
    let reg = (modrm >> 3) & 7;
    let operation = match (opcode, is_register, reg) {
        (0x01, true, _) => match modrm {
            0xd0 => Operation::Xgetbv,
            0xca => Operation::ClearAlignmentCheck,
            0xcb => Operation::SetAlignmentCheck,
            0xf9 => Operation::ReadTimestamp,
            _ => return None,
        },
        (0x00, _, 5) => Operation::VerifyForWriting,
        (0xb8, true, _) if prefixes.repeat => Operation::PopulationCount {
            destination: prefixes.extend_reg(reg),
            source: prefixes.extend_base(modrm & 7),
            wide: prefixes.wide(),
        },
        (0xae, false, 2) if !prefixes.operand_size => Operation::LoadMxcsr,
        (0xae, false, 3) if !prefixes.operand_size => Operation::StoreMxcsr,
        // XSAVEOPT may save as much as XSAVE does.
        (0xae, false, 4 | 6) if !prefixes.operand_size => Operation::Xsave,
        (0xae, false, 5) if !prefixes.operand_size => Operation::Xrstor,
        (0xae, false, 6) => Operation::Nothing,
        _ => return None,
    };
    if is_register {
        return Some((operation, None));
    }
    Some((operation, Some(memory_operand(cursor, prefixes, modrm)?)))
}

fn memory_operand(cursor: &mut Cursor<'_>, prefixes: Prefixes, modrm: u8) -> Option<MemoryOperand> {
    let mode = modrm >> 6;
    let mut operand = MemoryOperand {
        base: None,
        index: None,
        displacement: 0,
        relative_to_next: false,
        segment: prefixes.segment.unwrap_or(Segment::Flat),
    };
    match modrm & 7 {
        4 => {
            let sib = cursor.next()?;
            let index = prefixes.extend_index((sib >> 3) & 7);
            if index != 4 {
                operand.index = Some((index, sib >> 6));
            }
            if sib & 7 == 5 && mode == 0 {
                operand.displacement = cursor.displacement32()?;
            } else {
                operand.base = Some(prefixes.extend_base(sib & 7));
            }
        }
        5 if mode == 0 => {
            operand.displacement = cursor.displacement32()?;
            operand.relative_to_next = true;
        }
        base => operand.base = Some(prefixes.extend_base(base)),
    }
    match mode {
        1 => operand.displacement = cursor.displacement8()?,
        2 => operand.displacement = cursor.displacement32()?,
        _ => {}
    }
    Some(operand)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(bytes: &[u8]) -> [u8; 15] {
        let mut all = [0x90; 15];
        all[..bytes.len()].copy_from_slice(bytes);
        all
    }

    #[test]
    fn xsave64_with_base_and_displacement() {
        // xsave64 0x1440(%rdi)
        let instruction = decode(&padded(&[0x48, 0x0f, 0xae, 0xa7, 0x40, 0x14, 0, 0])).unwrap();
        assert_eq!(instruction.operation, Operation::Xsave);
        assert_eq!(instruction.length, 8);
        let regs = kvm_regs { rdi: 0x1000, ..Default::default() };
        assert_eq!(instruction.address(&regs, &kvm_sregs::default()), 0x2440);
    }

    #[test]
    fn xrstor64_with_extended_base() {
        // xrstor64 (%r12): SIB form
        let instruction = decode(&padded(&[0x49, 0x0f, 0xae, 0x2c, 0x24])).unwrap();
        assert_eq!(instruction.operation, Operation::Xrstor);
        assert_eq!(instruction.length, 5);
        let regs = kvm_regs { r12: 0x77c0, ..Default::default() };
        assert_eq!(instruction.address(&regs, &kvm_sregs::default()), 0x77c0);
    }

    #[test]
    fn operand_relative_to_gs_and_to_next_instruction() {
        // stmxcsr %gs:0x10(%rip)
        let instruction = decode(&padded(&[0x65, 0x0f, 0xae, 0x1d, 0x10, 0, 0, 0])).unwrap();
        assert_eq!(instruction.operation, Operation::StoreMxcsr);
        let regs = kvm_regs { rip: 0x100, ..Default::default() };
        let mut sregs = kvm_sregs::default();
        sregs.gs.base = 0x1_0000;
        assert_eq!(instruction.address(&regs, &sregs), 0x1_0000 + 0x100 + 8 + 0x10);
    }

    #[test]
    fn popcnt_of_extended_registers() {
        // popcnt %r9,%r10
        let instruction = decode(&padded(&[0xf3, 0x4d, 0x0f, 0xb8, 0xd1])).unwrap();
        let expected = Operation::PopulationCount { destination: 10, source: 9, wide: true };
        assert_eq!(instruction.operation, expected);
        assert_eq!(instruction.length, 5);
    }

    #[test]
    fn compacted_forms_and_fences_are_not_completed() {
        assert_eq!(decode(&padded(&[0x48, 0x0f, 0xc7, 0x27])), None);
        assert_eq!(decode(&padded(&[0x0f, 0xae, 0xf8])), None);
        assert_eq!(decode(&[0x66; 15]), None);
    }
}
