//! The header of a vsock packet (virtio 1.2, section 5.10.6).

/// Bytes of a header.
pub const HEADER_BYTES: usize = 44;

/// The only type of socket there is here.
pub const TYPE_STREAM: u16 = 1;

/// The sender of a SHUTDOWN receives no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// The sender of a SHUTDOWN sends no more.
pub const SHUTDOWN_SEND: u32 = 2;
/// Neither.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketOperation {
    /// Open a connection.
    Request,
    /// It is open.
    Response,
    /// It is closed, or never was open.
    Reset,
    /// One side stops sending or receiving.
    Shutdown,
    /// Data.
    Data,
    /// Only for its credit fields.
    CreditUpdate,
    /// Asks for the above.
    CreditRequest,
}

impl PacketOperation {
    fn from_wire(code: u16) -> Option<Self> {
        Some(match code {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }

    fn to_wire(self) -> u16 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::Data => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
        }
    }
}

/// A header; `operation` is `None` when its code means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// CID of the sender.
    pub source_cid: u64,
    /// CID of the receiver.
    pub destination_cid: u64,
    /// Port of the sender.
    pub source_port: u32,
    /// Port of the receiver.
    pub destination_port: u32,
    /// Bytes of payload.
    pub len: u32,
    /// Type of socket.
    pub socket_type: u16,
    /// What the packet is for.
    pub operation: Option<PacketOperation>,
    /// Flags of a SHUTDOWN.
    pub flags: u32,
    /// Bytes the sender can buffer for the connection.
    pub buffer_bytes: u32,
    /// Bytes of the connection that left that buffer so far, modulo 2^32.
    pub forwarded: u32,
}

impl Header {
    /// From the guest's bytes.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            source_cid: u64::from_le_bytes(field(bytes, 0)),
            destination_cid: u64::from_le_bytes(field(bytes, 8)),
            source_port: u32::from_le_bytes(field(bytes, 16)),
            destination_port: u32::from_le_bytes(field(bytes, 20)),
            len: u32::from_le_bytes(field(bytes, 24)),
            socket_type: u16::from_le_bytes(field(bytes, 28)),
            operation: PacketOperation::from_wire(u16::from_le_bytes(field(bytes, 30))),
            flags: u32::from_le_bytes(field(bytes, 32)),
            buffer_bytes: u32::from_le_bytes(field(bytes, 36)),
            forwarded: u32::from_le_bytes(field(bytes, 40)),
        }
    }

    /// For the guest.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            if let Some(place) = bytes.get_mut(at..at + field.len()) {
                place.copy_from_slice(field);
            }
            at += field.len();
        };
        put(&self.source_cid.to_le_bytes());
        put(&self.destination_cid.to_le_bytes());
        put(&self.source_port.to_le_bytes());
        put(&self.destination_port.to_le_bytes());
        put(&self.len.to_le_bytes());
        put(&self.socket_type.to_le_bytes());
        put(&self.operation.map_or(0, PacketOperation::to_wire).to_le_bytes());
        put(&self.flags.to_le_bytes());
        put(&self.buffer_bytes.to_le_bytes());
        put(&self.forwarded.to_le_bytes());
        bytes
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], offset: usize) -> [u8; N] {
    bytes
        .get(offset..offset + N)
        .and_then(|field| field.try_into().ok())
        .expect("every field lies inside the header")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn header_comes_back_from_its_bytes(bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES)) {
            let bytes: [u8; HEADER_BYTES] = bytes.try_into().unwrap();
            let header = Header::from_bytes(&bytes);
            prop_assert_eq!(Header::from_bytes(&header.to_bytes()), header);
            if header.operation.is_some() {
                prop_assert_eq!(header.to_bytes(), bytes);
            }
        }
    }
}
