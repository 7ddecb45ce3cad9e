//! Tests of the whole HTTP layer, with guests that are tasks of the test.

mod control_plane;
mod data_plane;
pub mod fixtures;
mod life;
mod node;
mod pause;
mod stub;
