//! Counters of the vsock device.

use crate::counters;

counters! {
    /// What went between the guest and the host's sockets.
    VsockMetrics {
        /// Connections host clients asked for.
        host_connections,
        /// Connections the guest asked for.
        guest_connections,
        /// Connections refused by the guest.
        refused_by_guest,
        /// Connections refused by the host: nobody listens.
        refused_by_host,
        /// Connections refused because there are too many.
        refused_by_limit,
        /// Connections ended so far.
        closed_connections,
        /// Handshakes that failed: bad line, too long, too slow.
        failed_handshakes,
        /// Times accepting was put off for want of descriptors.
        accept_pauses,
        /// Packets from the guest.
        guest_packets,
        /// Packets to the guest.
        host_packets,
        /// Payload bytes from the guest.
        guest_bytes,
        /// Payload bytes to the guest.
        host_bytes,
        /// Bytes from the guest that no host socket wanted any more.
        discarded_bytes,
        /// Times guest data had to wait for a host socket.
        delayed_writes,
        /// Times host data had to wait for the guest's credit.
        credit_stalls,
        /// Times packets to the guest had to wait for its buffers.
        buffer_stalls,
        /// Packets that broke the protocol; their connections were reset.
        protocol_errors,
        /// Chains that are no packet.
        malformed_packets,
        /// Resets of the transport told to the guest.
        transport_resets,
    }
}
