//! Writing and reading of the state file.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Version of the container. Sections carry versions of their own.
pub const FORMAT: u16 = 1;

/// Length of the fixed header.
pub const HEADER_BYTES: usize = 32;

/// Longest body that is read: the state of 32 vCPUs and a score of devices is a
/// few hundred KiB.
const BODY_BYTES_MAX: u64 = 64 << 20;

/// Most sections that are read.
const SECTIONS_MAX: u32 = 1024;

const MAGIC: &[u8; 8] = b"WARRENST";
const SECTION_HEADER_BYTES: usize = 8;

/// Architecture of the saved vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// 64-bit x86.
    X86_64,
}

impl Architecture {
    const fn code(self) -> u8 {
        match self {
            Self::X86_64 => 1,
        }
    }
}

/// What a section describes. Numbers are never used again for something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SectionKind(pub u16);

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StateFileError {
    /// Shorter than its header says, or than a header.
    #[error("state file is truncated: {have} bytes, {want} wanted")]
    Truncated {
        /// Bytes present.
        have: usize,
        /// Bytes needed.
        want: u64,
    },
    /// Longer than its header says.
    #[error("state file has {0} bytes after its end")]
    TrailingBytes(usize),
    /// Not a state file at all.
    #[error("not a Warren state file")]
    Magic,
    /// A newer or broken container.
    #[error("state file has format {0}, this version reads {FORMAT}")]
    Format(u16),
    /// Saved on other hardware.
    #[error("state file is for architecture {0}")]
    Architecture(u8),
    /// The header was damaged.
    #[error("checksum of the state file's header is wrong")]
    HeaderChecksum,
    /// The body was damaged.
    #[error("checksum of the state file's body is wrong")]
    BodyChecksum,
    /// A length or count beyond what is sensible.
    #[error("state file claims {0} bytes or sections, too many")]
    TooLarge(u64),
    /// Sections do not add up.
    #[error("sections of the state file do not fill its body")]
    Sections,
    /// The same kind twice.
    #[error("section {0:?} occurs twice")]
    Duplicate(SectionKind),
    /// A needed section is absent.
    #[error("section {0:?} is missing")]
    Missing(SectionKind),
    /// A section of a version this program does not know.
    #[error("section {kind:?} has version {version}")]
    SectionVersion {
        /// Kind.
        kind: SectionKind,
        /// Version found.
        version: u16,
    },
    /// The payload is not what its kind and version promise.
    #[error("section {0:?} cannot be decoded")]
    Decode(SectionKind),
    /// Restoring would leave this section out.
    #[error("section {0:?} is not known to this version")]
    Unknown(SectionKind),
    /// A value does not fit a section (over 4 GiB, or not serialisable).
    #[error("section {0:?} cannot be encoded")]
    Encode(SectionKind),
}

/// Collects sections and makes the file's bytes.
#[derive(Debug, Default)]
pub struct SectionsBuilder {
    count: u32,
    body: Vec<u8>,
}

impl SectionsBuilder {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a component's schema struct.
    ///
    /// # Errors
    /// [`StateFileError::Encode`] if it cannot be serialised.
    pub fn add<T: Serialize>(
        &mut self,
        kind: SectionKind,
        version: u16,
        value: &T,
    ) -> Result<(), StateFileError> {
        let payload = postcard::to_stdvec(value).map_err(|_| StateFileError::Encode(kind))?;
        self.add_bytes(kind, version, &payload)
    }

    /// Adds bytes that a component encoded by itself.
    ///
    /// # Errors
    /// [`StateFileError::Encode`] beyond 4 GiB.
    pub fn add_bytes(
        &mut self,
        kind: SectionKind,
        version: u16,
        payload: &[u8],
    ) -> Result<(), StateFileError> {
        let length = u32::try_from(payload.len()).map_err(|_| StateFileError::Encode(kind))?;
        self.body.extend_from_slice(&kind.0.to_le_bytes());
        self.body.extend_from_slice(&version.to_le_bytes());
        self.body.extend_from_slice(&length.to_le_bytes());
        self.body.extend_from_slice(payload);
        self.count += 1;
        Ok(())
    }

    /// The whole file.
    #[must_use]
    pub fn finish(self, architecture: Architecture) -> Vec<u8> {
        let mut file = Vec::with_capacity(HEADER_BYTES + self.body.len());
        file.extend_from_slice(MAGIC);
        file.extend_from_slice(&FORMAT.to_le_bytes());
        file.push(architecture.code());
        file.push(0);
        file.extend_from_slice(&self.count.to_le_bytes());
        let length = u64::try_from(self.body.len()).unwrap_or(u64::MAX);
        file.extend_from_slice(&length.to_le_bytes());
        file.extend_from_slice(&crc(&self.body).to_le_bytes());
        let header = crc(&file);
        file.extend_from_slice(&header.to_le_bytes());
        file.extend_from_slice(&self.body);
        file
    }
}

/// One section as it lies in the file.
type RawSection<'a> = (SectionKind, u16, &'a [u8]);

/// Sections of a file whose checksums hold. Each is taken once;
/// [`Sections::finish`] fails if one is left.
#[derive(Debug)]
pub struct Sections<'a> {
    left: Vec<RawSection<'a>>,
}

impl<'a> Sections<'a> {
    /// Checks header, checksums and section lengths.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(file: &'a [u8], architecture: Architecture) -> Result<Self, StateFileError> {
        let header = file
            .get(..HEADER_BYTES)
            .ok_or(StateFileError::Truncated { have: file.len(), want: HEADER_BYTES as u64 })?;
        if &header[..8] != MAGIC {
            return Err(StateFileError::Magic);
        }
        if u32_at(header, 28) != crc(&header[..28]) {
            return Err(StateFileError::HeaderChecksum);
        }
        let format = u16::from_le_bytes([header[8], header[9]]);
        if format != FORMAT {
            return Err(StateFileError::Format(format));
        }
        if header[10] != architecture.code() {
            return Err(StateFileError::Architecture(header[10]));
        }
        let count = u32_at(header, 12);
        let length = u64_at(header, 16);
        if count > SECTIONS_MAX {
            return Err(StateFileError::TooLarge(count.into()));
        }
        if length > BODY_BYTES_MAX {
            return Err(StateFileError::TooLarge(length));
        }
        let body = &file[HEADER_BYTES..];
        let have = body.len() as u64;
        if have < length {
            return Err(StateFileError::Truncated {
                have: file.len(),
                want: length + HEADER_BYTES as u64,
            });
        }
        if have > length {
            return Err(StateFileError::TrailingBytes(
                usize::try_from(have - length).unwrap_or(usize::MAX),
            ));
        }
        if u32_at(header, 24) != crc(body) {
            return Err(StateFileError::BodyChecksum);
        }
        Ok(Self { left: split(body, count)? })
    }

    /// Takes a section out; `decode` is told its version.
    ///
    /// # Errors
    /// [`StateFileError::Missing`] if it is not there.
    pub fn take(&mut self, kind: SectionKind) -> Result<(u16, &'a [u8]), StateFileError> {
        let index = self
            .left
            .iter()
            .position(|(found, _, _)| *found == kind)
            .ok_or(StateFileError::Missing(kind))?;
        let (_, version, payload) = self.left.swap_remove(index);
        Ok((version, payload))
    }

    /// Takes and decodes a section that has only one version so far.
    ///
    /// # Errors
    /// If it is missing, of another version, or not decodable to the last byte.
    pub fn take_version<T: DeserializeOwned>(
        &mut self,
        kind: SectionKind,
        version: u16,
    ) -> Result<T, StateFileError> {
        let (found, payload) = self.take(kind)?;
        if found != version {
            return Err(StateFileError::SectionVersion { kind, version: found });
        }
        match postcard::take_from_bytes(payload) {
            Ok((value, [])) => Ok(value),
            Ok(_) | Err(_) => Err(StateFileError::Decode(kind)),
        }
    }

    /// Kinds not taken yet.
    pub fn kinds(&self) -> impl Iterator<Item = SectionKind> + '_ {
        self.left.iter().map(|(kind, _, _)| *kind)
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// [`StateFileError::Unknown`] if a section was not taken.
    pub fn finish(self) -> Result<(), StateFileError> {
        match self.left.first() {
            Some((kind, _, _)) => Err(StateFileError::Unknown(*kind)),
            None => Ok(()),
        }
    }
}

fn split(body: &[u8], count: u32) -> Result<Vec<RawSection<'_>>, StateFileError> {
    let mut sections = Vec::new();
    let mut rest = body;
    for _ in 0..count {
        let (head, tail) =
            rest.split_at_checked(SECTION_HEADER_BYTES).ok_or(StateFileError::Sections)?;
        let kind = SectionKind(u16::from_le_bytes([head[0], head[1]]));
        let version = u16::from_le_bytes([head[2], head[3]]);
        let length = u32_at(head, 4);
        let length = usize::try_from(length).map_err(|_| StateFileError::Sections)?;
        let (payload, tail) = tail.split_at_checked(length).ok_or(StateFileError::Sections)?;
        if sections.iter().any(|(found, _, _)| *found == kind) {
            return Err(StateFileError::Duplicate(kind));
        }
        sections.push((kind, version, payload));
        rest = tail;
    }
    if rest.is_empty() { Ok(sections) } else { Err(StateFileError::Sections) }
}

fn crc(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(value)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CPU: SectionKind = SectionKind(1);
    const CLOCK: SectionKind = SectionKind(2);

    fn example() -> Vec<u8> {
        let mut builder = SectionsBuilder::new();
        builder.add(CPU, 1, &(7u64, vec![1u8, 2, 3])).unwrap();
        builder.add(CLOCK, 3, &"noon").unwrap();
        builder.finish(Architecture::X86_64)
    }

    #[test]
    fn sections_taken_in_any_order_come_back() {
        let file = example();
        let mut sections = Sections::parse(&file, Architecture::X86_64).unwrap();
        assert_eq!(sections.take_version::<String>(CLOCK, 3).unwrap(), "noon");
        assert_eq!(sections.take_version::<(u64, Vec<u8>)>(CPU, 1).unwrap(), (7, vec![1, 2, 3]));
        sections.finish().unwrap();
    }

    #[test]
    fn section_left_over_is_an_error() {
        let file = example();
        let mut sections = Sections::parse(&file, Architecture::X86_64).unwrap();
        sections.take(CPU).unwrap();
        assert_eq!(sections.finish(), Err(StateFileError::Unknown(CLOCK)));
    }

    #[test]
    fn section_of_other_version_is_named() {
        let file = example();
        let mut sections = Sections::parse(&file, Architecture::X86_64).unwrap();
        assert_eq!(
            sections.take_version::<String>(CLOCK, 2),
            Err(StateFileError::SectionVersion { kind: CLOCK, version: 3 })
        );
    }

    #[test]
    fn every_truncation_is_detected() {
        let file = example();
        for length in 0..file.len() {
            assert!(Sections::parse(&file[..length], Architecture::X86_64).is_err(), "{length}");
        }
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let file = example();
        for bit in 0..file.len() * 8 {
            let mut broken = file.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(Sections::parse(&broken, Architecture::X86_64).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Sections::parse(&bytes, Architecture::X86_64);
        }

        #[test]
        fn random_sections_round_trip(
            payloads in proptest::collection::vec(
                (any::<u16>(), proptest::collection::vec(any::<u8>(), 0..50)), 0..20)
        ) {
            let mut builder = SectionsBuilder::new();
            for (kind, (version, payload)) in payloads.iter().enumerate() {
                let kind = SectionKind(u16::try_from(kind).unwrap());
                builder.add(kind, *version, payload).unwrap();
            }
            let file = builder.finish(Architecture::X86_64);
            let mut sections = Sections::parse(&file, Architecture::X86_64).unwrap();
            for (kind, (version, payload)) in payloads.iter().enumerate() {
                let kind = SectionKind(u16::try_from(kind).unwrap());
                let found: Vec<u8> = sections.take_version(kind, *version).unwrap();
                prop_assert_eq!(&found, payload);
            }
            sections.finish().unwrap();
        }
    }
}
