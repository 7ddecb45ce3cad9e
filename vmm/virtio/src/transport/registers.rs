//! Offsets of the registers, the status bits, and which step may follow which.

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
};

/// "virt".
pub const MAGIC: u32 = 0x7472_6976;
/// The non-legacy layout.
pub const LAYOUT_VERSION: u32 = 2;
/// "WRRN".
pub const VENDOR: u32 = 0x4e52_5257;

/// A used ring changed.
pub const INTERRUPT_USED: u32 = 1;
/// The configuration space or the device's status changed.
pub const INTERRUPT_CONFIG: u32 = 2;

/// A register, by its offset in the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    /// Magic value.
    Magic,
    /// Version of the layout.
    Version,
    /// Device type.
    DeviceId,
    /// Vendor.
    VendorId,
    /// 32 bits of the offered features.
    DeviceFeatures,
    /// Which 32 bits.
    DeviceFeaturesSelect,
    /// 32 bits of the acknowledged features.
    DriverFeatures,
    /// Which 32 bits.
    DriverFeaturesSelect,
    /// The queue the queue registers speak of.
    QueueSelect,
    /// Largest size of that queue.
    QueueSizeMax,
    /// Its size.
    QueueSize,
    /// Whether it is in use.
    QueueReady,
    /// New buffers in a queue.
    QueueNotify,
    /// Pending interrupt causes.
    InterruptStatus,
    /// Causes the driver has seen.
    InterruptAcknowledge,
    /// Device status.
    Status,
    /// Descriptor table, low half.
    QueueDescriptorLow,
    /// Descriptor table, high half.
    QueueDescriptorHigh,
    /// Available ring, low half.
    QueueDriverLow,
    /// Available ring, high half.
    QueueDriverHigh,
    /// Used ring, low half.
    QueueDeviceLow,
    /// Used ring, high half.
    QueueDeviceHigh,
    /// Shared memory length, low half.
    SharedMemoryLengthLow,
    /// Shared memory length, high half.
    SharedMemoryLengthHigh,
    /// Shared memory base, low half.
    SharedMemoryBaseLow,
    /// Shared memory base, high half.
    SharedMemoryBaseHigh,
    /// Changes when the configuration space does.
    ConfigGeneration,
}

impl Register {
    /// First byte of the configuration space.
    pub const CONFIG: u64 = 0x100;

    /// The register at `offset`, if there is one.
    pub fn at(offset: u64) -> Option<Self> {
        Some(match offset {
            0x000 => Self::Magic,
            0x004 => Self::Version,
            0x008 => Self::DeviceId,
            0x00c => Self::VendorId,
            0x010 => Self::DeviceFeatures,
            0x014 => Self::DeviceFeaturesSelect,
            0x020 => Self::DriverFeatures,
            0x024 => Self::DriverFeaturesSelect,
            0x030 => Self::QueueSelect,
            0x034 => Self::QueueSizeMax,
            0x038 => Self::QueueSize,
            0x044 => Self::QueueReady,
            0x050 => Self::QueueNotify,
            0x060 => Self::InterruptStatus,
            0x064 => Self::InterruptAcknowledge,
            0x070 => Self::Status,
            0x080 => Self::QueueDescriptorLow,
            0x084 => Self::QueueDescriptorHigh,
            0x090 => Self::QueueDriverLow,
            0x094 => Self::QueueDriverHigh,
            0x0a0 => Self::QueueDeviceLow,
            0x0a4 => Self::QueueDeviceHigh,
            0x0b0 => Self::SharedMemoryLengthLow,
            0x0b4 => Self::SharedMemoryLengthHigh,
            0x0b8 => Self::SharedMemoryBaseLow,
            0x0bc => Self::SharedMemoryBaseHigh,
            0x0fc => Self::ConfigGeneration,
            _ => return None,
        })
    }
}

/// The device status register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Status(u32);

/// What a write to the status register asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusChange {
    /// Forget everything.
    Reset,
    /// The driver is done negotiating: check its features.
    CheckFeatures,
    /// The driver is ready: activate the device.
    Activate,
    /// The new bits need nothing done.
    Accept,
    /// Not a legal step; ignored.
    Refuse,
}

impl Status {
    /// The driver saw the device.
    pub const ACKNOWLEDGE: Self = Self(VIRTIO_CONFIG_S_ACKNOWLEDGE);
    /// The driver can drive it.
    pub const DRIVER: Self = Self(VIRTIO_CONFIG_S_DRIVER);
    /// Features are agreed.
    pub const FEATURES_OK: Self = Self(VIRTIO_CONFIG_S_FEATURES_OK);
    /// The driver is ready.
    pub const DRIVER_OK: Self = Self(VIRTIO_CONFIG_S_DRIVER_OK);
    /// The device gave up.
    pub const NEEDS_RESET: Self = Self(VIRTIO_CONFIG_S_NEEDS_RESET);
    /// The driver gave up.
    pub const FAILED: Self = Self(VIRTIO_CONFIG_S_FAILED);

    /// Every bit that has a meaning.
    const KNOWN: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE
        | VIRTIO_CONFIG_S_DRIVER
        | VIRTIO_CONFIG_S_FEATURES_OK
        | VIRTIO_CONFIG_S_DRIVER_OK
        | VIRTIO_CONFIG_S_NEEDS_RESET
        | VIRTIO_CONFIG_S_FAILED;

    /// From saved bits; `None` if a driver cannot have got there.
    pub fn from_saved(bits: u32) -> Option<Self> {
        let status = Self(bits);
        let ladder = [Self::ACKNOWLEDGE, Self::DRIVER, Self::FEATURES_OK, Self::DRIVER_OK];
        let gap = ladder.windows(2).any(|pair| match pair {
            [lower, upper] => status.has(*upper) && !status.has(*lower),
            _ => false,
        });
        (bits & !Self::KNOWN == 0 && !gap).then_some(status)
    }

    /// The register's bits.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Whether all bits of `other` are set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Sets the bits of `other`.
    pub fn add(&mut self, other: Self) {
        self.0 |= other.0;
    }

    /// Whether the device may do work.
    pub fn running(self) -> bool {
        self.has(Self::DRIVER_OK) && !self.has(Self::NEEDS_RESET) && !self.has(Self::FAILED)
    }

    /// Whether features may be written.
    pub fn negotiating(self) -> bool {
        self.has(Self::DRIVER) && !self.has(Self::FEATURES_OK) && !self.has(Self::FAILED)
    }

    /// Whether queues may be configured.
    pub fn configuring(self) -> bool {
        self.has(Self::FEATURES_OK)
            && !self.has(Self::DRIVER_OK)
            && !self.has(Self::NEEDS_RESET)
            && !self.has(Self::FAILED)
    }

    /// Judges a write of `bits`. Bits are only ever added, and on the ladder one
    /// step at a time (ACKNOWLEDGE and DRIVER may come together).
    pub fn judge(self, bits: u32) -> StatusChange {
        if bits == 0 {
            return StatusChange::Reset;
        }
        // DEVICE_NEEDS_RESET is the device's to set; a driver writes it back.
        let new = (bits & Self::KNOWN & !Self::NEEDS_RESET.0) & !self.0;
        if self.0 & !Self::NEEDS_RESET.0 & !bits != 0 {
            return StatusChange::Refuse;
        }
        let failed = new & Self::FAILED.0 != 0;
        let step = new & !Self::FAILED.0;
        let reachable = match step {
            0 => return if failed { StatusChange::Accept } else { StatusChange::Refuse },
            bits if bits == Self::ACKNOWLEDGE.0 => StatusChange::Accept,
            bits if bits == Self::ACKNOWLEDGE.0 | Self::DRIVER.0 => StatusChange::Accept,
            bits if bits == Self::DRIVER.0 && self.has(Self::ACKNOWLEDGE) => StatusChange::Accept,
            bits if bits == Self::FEATURES_OK.0 && self.has(Self::DRIVER) => {
                StatusChange::CheckFeatures
            }
            bits if bits == Self::DRIVER_OK.0 && self.configuring() => StatusChange::Activate,
            _ => StatusChange::Refuse,
        };
        if failed { StatusChange::Accept } else { reachable }
    }

    /// Applies the driver's bits of an accepted write.
    pub fn accept(&mut self, bits: u32) {
        self.0 |= bits & Self::KNOWN & !Self::NEEDS_RESET.0;
    }
}
