//! How the process ends: 0 fine, 1 the run failed, 2 it was called wrongly.

use crate::report;
use distgpipe::engine::exit_at_once;
use std::fmt;
use std::io;

/// The command line or a configuration file asks for something that cannot be: exit status 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// An error that names the flag and the remedy.
pub fn usage(text: impl Into<String>) -> anyhow::Error {
    Usage(text.into()).into()
}

/// Says what went wrong, if anything did, and ends the process. A stage that did not end in time may still compute, so
/// nothing else runs.
pub fn end(result: anyhow::Result<()>) -> ! {
    exit_at_once(status(result))
}

fn status(result: anyhow::Result<()>) -> i32 {
    let Err(error) = result else {
        return 0;
    };
    // Somebody read enough of our output, as `head` does: that is no failure.
    let closed = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.chain().any(closed) {
        return 0;
    }
    report::note(&format!("error: {}", told(&error)));
    if error.is::<Usage>() {
        2
    } else {
        1
    }
}

/// An error with its causes; one that is already in the text is not said again.
fn told(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| match cause.to_string() {
        said if text.contains(&said) => text,
        said if text.is_empty() => said,
        said => format!("{text}: {said}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe::data::DataError;
    use distgpipe::trainer::TrainError;

    #[test]
    fn a_cause_is_told_once() {
        let damaged = DataError::BatchSize { rows: 1, batch: 2 };
        let (inner, outer) = (damaged.to_string(), anyhow::Error::from(TrainError::Data(damaged)).context("--data"));
        assert_eq!(told(&outer), format!("--data: loading: {inner}"));
    }
}
