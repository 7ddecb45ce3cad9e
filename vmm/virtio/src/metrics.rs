//! One way to declare a device's counters: a plain struct that serialises, and
//! lists itself by name for the VMM's statistics.

/// Declares a struct of `u64` counters with `entries()`.
#[macro_export]
macro_rules! counters {
    ($(#[$outer:meta])* $name:ident { $($(#[$inner:meta])* $field:ident,)+ }) => {
        $(#[$outer])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $name {
            $($(#[$inner])* pub $field: u64,)+
        }

        impl $name {
            /// The counters by name, in order of declaration.
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field),)+]
            }
        }
    };
}
