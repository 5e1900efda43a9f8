//! What a worker runs: the driver's commands, and for each step its actions of the plan on its partitions.
//!
//! | module | subject |
//! | --- | --- |
//! | [`worker`] | builds the partitions, runs the driver's commands, updates parameters, sends and loads state |
//! | [`stage`] | executes the actions of one step in the order of the plan |
//! | [`micro_batch_pass`] | one micro-batch in one partition: forward, recomputation, backward |
//! | [`partition`] | consecutive layers with their tensors |
//! | [`portal`] | which tensors go between which partitions |
//! | [`deferred_batch_norm`] | running statistics of the whole batch |
//! | [`accumulation`] | which batches share one update |
//! | [`clipping`] | gradient norms and clipping |
//! | [`divergence`] | detects parameters that grow without bound |
//! | [`all_reduce`] | the sum of the gradients of replicas |
//! | [`gradient_watch`] | which gradients are final while a backward pass runs |
//! | [`graphs`] | training passes as CUDA graphs |
//! | [`optimizer`] | the update of the parameters |
//! | [`parameter_groups`] | which parameters have their own rate or weight decay, and which are frozen |
//! | [`trace`] | times and events |

pub mod accumulation;
pub mod all_reduce;
pub mod clipping;
pub mod deferred_batch_norm;
pub mod divergence;
pub mod gradient_watch;
pub mod graphs;
pub mod micro_batch_pass;
pub mod optimizer;
pub mod parameter_groups;
pub mod partition;
pub mod portal;
pub mod stage;
pub mod trace;
pub mod worker;
