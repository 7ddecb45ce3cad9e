//! The file that holds the state of a frozen microVM.
//!
//! ```text
//! offset  size
//!      0     8  magic "WARRENST"
//!      8     2  format, little endian like all numbers
//!     10     1  architecture (1: x86_64)
//!     11     1  zero
//!     12     4  number of sections
//!     16     8  length of the body in bytes
//!     24     4  CRC-32 (IEEE) of the body
//!     28     4  CRC-32 (IEEE) of bytes 0–27
//!     32        body: sections, one after the other
//!
//! section:   2  kind
//!            2  version of that kind
//!            4  length of the payload
//!               payload (postcard, schema owned by the component)
//! ```
//!
//! The header can be read and judged without decoding the body. Restoring takes
//! every section or fails with the first that nobody knows. Guest RAM is not in
//! this file.

mod format;

pub use format::{
    Architecture, FORMAT, HEADER_BYTES, SectionKind, Sections, SectionsBuilder, StateFileError,
};
