//! Flow control of one connection, as arithmetic only.
//!
//! Each side tells the size of its buffer and how many bytes ever left it; what
//! was sent and has not left is in the buffer or under way. All counts are modulo
//! 2^32.

use std::num::Wrapping;

use super::BUFFER_BYTES;

/// The guest sent more than it had credit for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreditExceeded;

/// Counts of one connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Credit {
    received: Wrapping<u32>,
    forwarded: Wrapping<u32>,
    announced: Wrapping<u32>,
    sent: Wrapping<u32>,
    peer_buffer_bytes: u32,
    peer_forwarded: Wrapping<u32>,
}

impl Credit {
    /// The guest sent `bytes`.
    pub fn receive(&mut self, bytes: u32) -> Result<(), CreditExceeded> {
        let held = self.held_bytes();
        match held.checked_add(bytes) {
            Some(total) if total <= BUFFER_BYTES => {
                self.received += bytes;
                Ok(())
            }
            Some(_) | None => Err(CreditExceeded),
        }
    }

    /// `bytes` of what was received went on to the host socket.
    pub fn forward(&mut self, bytes: u32) {
        assert!(bytes <= self.held_bytes(), "more was forwarded than received");
        self.forwarded += bytes;
    }

    /// Bytes received and not forwarded.
    pub fn held_bytes(&self) -> u32 {
        (self.received - self.forwarded).0
    }

    /// Whether the guest should hear of the room there is: half a buffer is more
    /// than it knows.
    pub fn update_is_due(&self) -> bool {
        (self.forwarded - self.announced).0 >= BUFFER_BYTES / 2
    }

    /// The two fields of a packet about to be sent to the guest.
    pub fn announce(&mut self) -> (u32, u32) {
        self.announced = self.forwarded;
        (BUFFER_BYTES, self.forwarded.0)
    }

    /// The two fields of a packet of the guest.
    pub fn learn(&mut self, buffer_bytes: u32, forwarded: u32) {
        self.peer_buffer_bytes = buffer_bytes;
        self.peer_forwarded = Wrapping(forwarded);
    }

    /// Bytes the guest has room for.
    pub fn sendable_bytes(&self) -> u32 {
        // A guest that claims to have forwarded more than it was sent gets nothing.
        self.peer_buffer_bytes.saturating_sub((self.sent - self.peer_forwarded).0)
    }

    /// `bytes` were sent to the guest.
    pub fn send(&mut self, bytes: u32) {
        assert!(bytes <= self.sendable_bytes(), "more was sent than the guest has room for");
        self.sent += bytes;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Act {
        Receive(u32),
        Forward(u32),
        Announce,
        Learn(u32, u32),
        Send(u32),
    }

    fn act() -> impl Strategy<Value = Act> {
        let bytes = prop_oneof![0..4096u32, 0..2 * BUFFER_BYTES, any::<u32>()];
        prop_oneof![
            bytes.clone().prop_map(Act::Receive),
            bytes.clone().prop_map(Act::Forward),
            Just(Act::Announce),
            (bytes.clone(), bytes.clone()).prop_map(|(a, b)| Act::Learn(a, b)),
            bytes.prop_map(Act::Send),
        ]
    }

    proptest! {
        /// The model counts in 64 bits, from a start near the wrap.
        #[test]
        fn counts_agree_with_a_wide_model(start in any::<u32>(), acts in proptest::collection::vec(act(), 0..200)) {
            let mut credit = Credit {
                received: Wrapping(start),
                forwarded: Wrapping(start),
                announced: Wrapping(start),
                ..Credit::default()
            };
            let (mut received, mut forwarded, mut announced) = (0u64, 0u64, 0u64);
            for act in acts {
                match act {
                    Act::Receive(bytes) => {
                        let fits = received - forwarded + u64::from(bytes) <= u64::from(BUFFER_BYTES);
                        prop_assert_eq!(credit.receive(bytes).is_ok(), fits);
                        received += if fits { u64::from(bytes) } else { 0 };
                    }
                    Act::Forward(bytes) => {
                        let bytes = bytes.min(credit.held_bytes());
                        credit.forward(bytes);
                        forwarded += u64::from(bytes);
                    }
                    Act::Announce => {
                        let (buffer, count) = credit.announce();
                        announced = forwarded;
                        prop_assert_eq!(buffer, BUFFER_BYTES);
                        prop_assert_eq!(u64::from(count), (u64::from(start) + forwarded) & 0xffff_ffff);
                    }
                    Act::Learn(buffer, count) => credit.learn(buffer, count),
                    Act::Send(bytes) => credit.send(bytes.min(credit.sendable_bytes())),
                }
                prop_assert_eq!(u64::from(credit.held_bytes()), received - forwarded);
                prop_assert_eq!(credit.update_is_due(), forwarded - announced >= u64::from(BUFFER_BYTES / 2));
                prop_assert!(credit.sendable_bytes() <= credit.peer_buffer_bytes);
            }
        }

        /// An honest guest and this side never lose a byte of credit.
        #[test]
        fn honest_peer_is_never_overrun(buffer in 1..300_000u32, steps in proptest::collection::vec((any::<u32>(), any::<u32>()), 1..100)) {
            let mut credit = Credit::default();
            let (mut in_guest, mut consumed) = (0u32, Wrapping(0u32));
            credit.learn(buffer, 0);
            for (send, consume) in steps {
                let sent = send % (credit.sendable_bytes() + 1);
                credit.send(sent);
                in_guest += sent;
                prop_assert!(in_guest <= buffer);
                let taken = consume % (in_guest + 1);
                in_guest -= taken;
                consumed += taken;
                credit.learn(buffer, consumed.0);
                prop_assert_eq!(credit.sendable_bytes(), buffer - in_guest);
            }
        }
    }
}
