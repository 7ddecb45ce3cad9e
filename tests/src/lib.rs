//! Harness for tests with real microVMs.
