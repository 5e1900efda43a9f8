//! The subcommands, one file each.

pub mod balance;
pub mod bandwidth;
pub mod codecs;
pub mod data;
pub mod demo;
pub mod devices;
pub mod evaluate;
pub mod join;
pub mod models;
pub mod new;
pub mod predict;
pub mod recipe;
pub mod schedule;
pub mod serve;
pub mod train;
pub mod worker;
