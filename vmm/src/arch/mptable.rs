//! MP table (Intel MultiProcessor Specification 1.4), for guests with several vCPUs:
//! processors, one ISA bus, one IOAPIC and its lines.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::layout::CONVENTIONAL_END;

const APIC_VERSION: u8 = 0x14;
const IOAPIC_ADDRESS: u32 = 0xfec0_0000;
const LOCAL_APIC_ADDRESS: u32 = 0xfee0_0000;
const CPU_ENABLED: u8 = 1;
const CPU_IS_BOOT: u8 = 2;
const ISA_LINES: u8 = 16;

const ENTRY_PROCESSOR: u8 = 0;
const ENTRY_BUS: u8 = 1;
const ENTRY_IOAPIC: u8 = 2;
const ENTRY_INTERRUPT: u8 = 3;
const ENTRY_LOCAL_INTERRUPT: u8 = 4;

const INTERRUPT_VECTORED: u8 = 0;
const INTERRUPT_NMI: u8 = 1;
const INTERRUPT_EXTINT: u8 = 3;

/// Writes the table into the last KiB of conventional memory.
pub(super) fn write(memory: &GuestMemoryMmap, vcpus: u8) -> Result<(), GuestMemoryError> {
    let table = table(vcpus);
    let pointer = GuestAddress(CONVENTIONAL_END);
    let table_at = CONVENTIONAL_END + 16;
    memory.write_slice(&floating_pointer(table_at), pointer)?;
    memory.write_slice(&table, GuestAddress(table_at))
}

fn floating_pointer(table: u64) -> [u8; 16] {
    let mut pointer = [0; 16];
    pointer[..4].copy_from_slice(b"_MP_");
    pointer[4..8].copy_from_slice(&table.to_le_bytes()[..4]);
    pointer[8] = 1; // length in 16 bytes
    pointer[9] = 4; // specification 1.4
    pointer[10] = checksum(&pointer);
    pointer
}

fn table(vcpus: u8) -> Vec<u8> {
    let ioapic = vcpus;
    let mut entries = Vec::new();
    let mut count = 0u16;
    let mut push = |bytes: &[u8]| {
        entries.extend_from_slice(bytes);
        count += 1;
    };
    for id in 0..vcpus {
        let flags = CPU_ENABLED | if id == 0 { CPU_IS_BOOT } else { 0 };
        let mut processor = [0; 20];
        processor[..4].copy_from_slice(&[ENTRY_PROCESSOR, id, APIC_VERSION, flags]);
        processor[4] = 0x60; // family 6
        processor[5] = 0x06;
        processor[8..10].copy_from_slice(&0x201u16.to_le_bytes()); // APIC, FPU
        push(&processor);
    }
    push(&[ENTRY_BUS, 0, b'I', b'S', b'A', b' ', b' ', b' ']);
    let address = IOAPIC_ADDRESS.to_le_bytes();
    push(&[ENTRY_IOAPIC, ioapic, APIC_VERSION, 1, address[0], address[1], address[2], address[3]]);
    for line in 0..ISA_LINES {
        push(&[ENTRY_INTERRUPT, INTERRUPT_VECTORED, 0, 0, 0, line, ioapic, line]);
    }
    push(&[ENTRY_LOCAL_INTERRUPT, INTERRUPT_EXTINT, 0, 0, 0, 0, 0, 0]);
    push(&[ENTRY_LOCAL_INTERRUPT, INTERRUPT_NMI, 0, 0, 0, 0, 0xff, 1]);

    let mut table = vec![0; 44];
    let length = u16::try_from(table.len() + entries.len()).expect("at most 32 vCPUs fit");
    table[..4].copy_from_slice(b"PCMP");
    table[4..6].copy_from_slice(&length.to_le_bytes());
    table[6] = 4;
    table[8..16].copy_from_slice(b"WARREN  ");
    table[16..28].copy_from_slice(b"MICROVM     ");
    table[34..36].copy_from_slice(&count.to_le_bytes());
    table[36..40].copy_from_slice(&LOCAL_APIC_ADDRESS.to_le_bytes());
    table.extend_from_slice(&entries);
    table[7] = checksum(&table);
    table
}

/// The byte that makes the sum zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_zero_and_lengths_right() {
        for vcpus in [1, 2, 32] {
            let table = table(vcpus);
            assert_eq!(checksum(&table), 0);
            assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
            assert!(table.len() <= 1024 - 16, "{} bytes", table.len());
        }
        assert_eq!(checksum(&floating_pointer(0x9_fc10)), 0);
    }
}
