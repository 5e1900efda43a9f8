//! `distgpipe devices`: what this machine has to compute on, what works, and what a GPU lacks.

use crate::report;
use crate::report::table::{Side, Table};
use crate::report::units::{bytes, plural};
use distgpipe::engine::{inventory, CpuInfo, CudaInfo, Inventory};

/// Flags of `distgpipe devices`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  What is there, what works, and what to do about the rest:
      distgpipe devices
  The number of GPUs, for a script:
      distgpipe devices --json | jq '.cuda | length'

The first column is what --device of `train`, `evaluate` and `serve` takes. A GPU needs the three libraries in the second table. \
The exit status is 0 even if there is no GPU.")]
pub struct DevicesArgs {
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the devices and the state of the libraries.
pub fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    let found = inventory();
    if args.json {
        return report::print_json(&serde_json::to_value(&found)?);
    }
    report::print(&text(&found))
}

fn text(found: &Inventory) -> String {
    let mut devices = Table::new(&[("device", Side::Left), ("what it is", Side::Left)]);
    devices.row(vec!["cpu".to_owned(), describe_cpu(&found.cpu)]);
    for device in &found.cuda {
        devices.row(vec![format!("cuda:{}", device.index), describe_cuda(device)]);
    }
    let mut libraries =
        Table::new(&[("library for a GPU", Side::Left), ("purpose", Side::Left), ("state", Side::Left)]);
    for library in &found.libraries {
        let state = match (&library.problem, &library.version) {
            (Some(_), _) => "missing".to_owned(),
            (None, Some(version)) => format!("works, version {version}"),
            (None, None) => "works".to_owned(),
        };
        libraries.row(vec![library.file.to_owned(), library.purpose.to_owned(), state]);
    }
    let mut text = format!("{}\n{}\n", devices.render(), libraries.render());
    for library in &found.libraries {
        if let (Some(problem), Some(remedy)) = (&library.problem, library.remedy) {
            text.push_str(&format!("{}: {problem}\n  {remedy}\n", library.file));
        }
    }
    if found.libraries.iter().any(|library| library.problem.is_some()) {
        text.push('\n');
    }
    text.push_str(&format!("--device auto, the default, is {} here\n", found.auto));
    text
}

fn describe_cpu(cpu: &CpuInfo) -> String {
    let name = if cpu.name.is_empty() { String::new() } else { format!("{}, ", cpu.name) };
    format!("{name}{}, {}, {}", plural(cpu.cores, "core"), bytes(cpu.memory_bytes as f64), cpu.instructions)
}

fn describe_cuda(device: &CudaInfo) -> String {
    let (major, minor) = device.compute_capability;
    format!("{}, {}, compute capability {major}.{minor}", device.name, bytes(device.memory_bytes as f64))
}
