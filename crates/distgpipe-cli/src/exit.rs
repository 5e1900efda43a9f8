//! Exit status and error messages: 0 success, 1 the run failed, 2 wrong usage, 3 a worker is in another run, 128 + N stopped by
//! signal N.

use crate::mpi;
use crate::report;
use crate::signals::Interrupted;
use distgpipe::{Failure, Fault};
use std::fmt;
use std::io;

/// An error in the command line or in a file that it names: exit status 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Context of a failed run: the command that resumes it. It is printed after the error.
#[derive(Debug)]
pub struct ResumeCommand(pub String);

impl fmt::Display for ResumeCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An error in usage. The text names the flag and the remedy.
pub fn usage(text: impl Into<String>) -> anyhow::Error {
    Usage(text.into()).into()
}

/// Prints the error, if there is one, and ends the process at once: a stage that did not stop in time may still be computing, so no
/// destructors run.
pub fn end(result: anyhow::Result<()>) -> ! {
    mpi::exit(status(result))
}

fn status(result: anyhow::Result<()>) -> i32 {
    let Err(error) = result else {
        return 0;
    };
    // A reader that closes the pipe early, such as `head`, is not a failure.
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.chain().any(closed) {
        return 0;
    }
    if let Some(interrupted) = error.downcast_ref::<Interrupted>() {
        report::note(&interrupted.to_string());
        return interrupted.status();
    }
    report::note(&format!("error: {}", full_text(&error)));
    if let Some(ResumeCommand(command)) = error.downcast_ref() {
        let first = if error.chain().any(is_full_disk) { ", once there is space on the disk" } else { "" };
        report::note(&format!("to resume from the newest checkpoint{first}: {command}"));
    }
    if error.is::<Usage>() {
        2
    } else if error.chain().any(is_busy) {
        3
    } else {
        1
    }
}

/// Whether a file could not be written for lack of space.
fn is_full_disk(cause: &(dyn std::error::Error + 'static)) -> bool {
    let kind = cause.downcast_ref().map(io::Error::kind);
    matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// Whether a worker could not be joined because it is in another run: a script may try again later.
fn is_busy(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.downcast_ref().is_some_and(Failure::is_busy) || matches!(cause.downcast_ref(), Some(Fault::Busy { .. }))
}

/// An error and its causes. A cause whose text is already included is left out.
fn full_text(error: &anyhow::Error) -> String {
    let command = usize::from(error.is::<ResumeCommand>());
    error.chain().skip(command).fold(String::new(), |text, cause| match cause.to_string() {
        cause if text.contains(&cause) => text,
        cause if text.is_empty() => cause,
        cause => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::data::DataError;
    use distgpipe::train::weights::WeightsError;
    use distgpipe::train::TrainError;

    #[test]
    fn a_full_disk_is_found_among_the_causes() {
        let error = |kind: io::ErrorKind| {
            let source = io::Error::from(kind);
            let written = WeightsError::Io { file: "model.safetensors".into(), doing: "writing it", source };
            anyhow::Error::from(TrainError::Checkpoint(written.into())).context(ResumeCommand("distgpipe".to_owned()))
        };
        assert!(error(io::ErrorKind::StorageFull).chain().any(is_full_disk));
        assert!(!error(io::ErrorKind::PermissionDenied).chain().any(is_full_disk));
    }

    #[test]
    fn every_cause_is_printed_once() {
        let damaged = DataError::BatchSize { rows: 1, batch: 2 };
        let (inner, outer) = (damaged.to_string(), anyhow::Error::from(TrainError::Data(damaged)).context("--data"));
        assert_eq!(full_text(&outer), format!("--data: loading: {inner}"));
    }
}
