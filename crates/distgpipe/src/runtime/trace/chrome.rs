//! Traces in the format of Chrome and Perfetto.

use super::{now_ns, Phase, Span};
use serde::de::IgnoredAny;
use serde::Deserialize;
use serde_json::json;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Read, Result, Seek, SeekFrom, Write};
use std::path::Path;

/// Each worker has a lane for its own thread, for encoding, decoding and the all-reduce: events in one lane must not overlap.
const LANES: [&str; 4] = ["", " encodes", " decodes", " all-reduces"];
const SEPARATOR: &[u8] = b",\n";
const END: &[u8] = b"\n]\n";
/// How many bytes at the end of a file are searched for its last whole event.
const TAIL_BYTES: u64 = 1 << 20;

/// A file in the trace format of Chrome and Perfetto. Events are written as they come: nothing is kept in memory.
///
/// The file is a JSON array with one event per line. Both programs also open one without the closing bracket, which a killed
/// run leaves.
#[derive(Debug)]
pub struct ChromeTrace {
    out: BufWriter<File>,
    /// The time that the trace calls 0.
    origin_ns: u64,
}

impl ChromeTrace {
    /// Starts a file. `names` are the names of the workers, by number.
    pub fn create(path: &Path, names: &[String]) -> Result<Self> {
        let mut trace = ChromeTrace { out: BufWriter::new(File::create(path)?), origin_ns: now_ns() };
        trace.out.write_all(b"[\n")?;
        let about = json!({"name": "distgpipe", "origin_ns": trace.origin_ns});
        serde_json::to_writer(&mut trace.out, &json!({"ph": "M", "name": "process_name", "pid": 0, "args": about}))?;
        trace.name(names)?;
        Ok(trace)
    }

    /// Continues the file of a run that ended or was killed, with the same clock. Starts a new one if there is none.
    pub fn resume(path: &Path, names: &[String]) -> Result<Self> {
        let mut file = match File::options().read(true).write(true).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Self::create(path, names),
            opened => opened?,
        };
        let Some((origin_ns, end)) = origin(&file)?.zip(end(&mut file)?) else {
            return Self::create(path, names);
        };
        file.set_len(end)?;
        file.seek(SeekFrom::End(0))?;
        let mut trace = ChromeTrace { out: BufWriter::new(file), origin_ns };
        trace.name(names)?;
        Ok(trace)
    }

    /// Writes the names of the lanes.
    fn name(&mut self, names: &[String]) -> Result<()> {
        for (i, name) in names.iter().enumerate() {
            for (lane, does) in LANES.iter().enumerate() {
                let (lane, about) = (LANES.len() * i + lane, json!({"name": format!("{name}{does}")}));
                self.event(&json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": about}))?;
            }
        }
        self.out.flush()
    }

    /// Appends events, and flushes them.
    pub fn write(&mut self, spans: &[Span]) -> Result<()> {
        for span in spans {
            // The clock of another host may be behind.
            let start_us = (i128::from(span.start_ns) - i128::from(self.origin_ns)) as f64 / 1e3;
            self.event(&json!({
                "ph": "X",
                "name": if span.action.is_empty() { span.phase.name() } else { &span.action },
                "cat": span.phase.name(),
                "pid": 0,
                "tid": LANES.len() * span.worker as usize + lane(span.phase),
                "ts": start_us,
                "dur": span.end_ns.saturating_sub(span.start_ns) as f64 / 1e3,
                "args": {"step": span.step},
            }))?;
        }
        self.out.flush()
    }

    /// The separator comes first, so that what is written is whole but for the closing bracket.
    fn event(&mut self, event: &serde_json::Value) -> Result<()> {
        self.out.write_all(SEPARATOR)?;
        Ok(serde_json::to_writer(&mut self.out, event)?)
    }

    /// Ends the array.
    pub fn finish(mut self) -> Result<()> {
        self.out.write_all(END)?;
        self.out.flush()
    }
}

fn lane(phase: Phase) -> usize {
    match phase {
        Phase::Encode => 1,
        Phase::Decode => 2,
        Phase::AllReduce => 3,
        _ => 0,
    }
}

/// The origin of a file that [`ChromeTrace`] wrote: its second line has it.
fn origin(file: &File) -> Result<Option<u64>> {
    #[derive(Deserialize)]
    struct Process {
        args: Args,
    }
    #[derive(Deserialize)]
    struct Args {
        origin_ns: u64,
    }
    let mut lines = BufReader::new(file).take(TAIL_BYTES).split(b'\n').skip(1);
    let line = lines.next().transpose()?.unwrap_or_default();
    let event = line.strip_suffix(b",").unwrap_or(&line);
    Ok(serde_json::from_slice(event).ok().map(|Process { args }| args.origin_ns))
}

/// Where the last whole event of a file ends.
fn end(file: &mut File) -> Result<Option<u64>> {
    let length = file.seek(SeekFrom::End(0))?;
    let start = length.saturating_sub(TAIL_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail)?;
    if let Some(events) = tail.strip_suffix(END) {
        return Ok(Some(start + events.len() as u64));
    }
    // The kill may have come between the two bytes of a separator.
    let tail = tail.strip_suffix(&SEPARATOR[..1]).unwrap_or(&tail);
    let Some(last) = tail.windows(SEPARATOR.len()).rposition(|bytes| bytes == SEPARATOR) else { return Ok(None) };
    let whole = serde_json::from_slice::<IgnoredAny>(&tail[last + SEPARATOR.len()..]).is_ok();
    Ok(Some(start + if whole { tail.len() } else { last } as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn span(start_ns: u64, phase: Phase, action: &str) -> Span {
        Span { worker: 1, step: 3, phase, action: action.to_owned(), start_ns, end_ns: start_ns + 2_000 }
    }

    fn parsed(text: &str) -> serde_json::Result<Vec<Value>> {
        serde_json::from_str(text)
    }

    /// Every event is handed on when it comes, so a trace of any length takes no memory.
    #[test]
    fn a_trace_is_on_the_disk_after_each_step_and_whole_but_for_its_bracket() {
        let path = std::env::temp_dir().join(format!("distgpipe-{}-trace.json", std::process::id()));
        let names = ["a".to_owned(), "b".to_owned()];
        let mut trace = ChromeTrace::create(&path, &names).unwrap();
        let (origin, first) = (trace.origin_ns, 1 + names.len() * LANES.len());
        trace.write(&[]).unwrap();
        for step in 1..=3 {
            trace.write(&[span(origin, Phase::Encode, ""), span(origin - step, Phase::Forward, "1F0")]).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(parsed(&format!("{text}]")).unwrap().len(), first + 2 * step as usize);
        }
        trace.finish().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let events = parsed(&text).unwrap();
        assert_eq!((&events[6]["args"]["name"], &events[6]["tid"]), (&"b encodes".into(), &5.into()));
        let event = |i: usize, name: &str| events[i][name].clone();
        let encodes = (event(first, "name"), event(first, "tid"), event(first, "dur"));
        assert_eq!(encodes, ("encode".into(), 5.into(), 2.0.into()));
        assert_eq!((event(first + 1, "name"), event(first + 1, "tid")), ("1F0".into(), 4.into()));
        // An event that started before the trace, by another clock.
        assert_eq!((event(first, "ts"), event(first + 5, "ts")), (json!(0.0), json!(-0.003)));

        // Ended, or killed at any byte of its last event: what is whole stays, and the clock goes on.
        let (last, ended) = (text.rfind(",\n").unwrap(), text.len());
        for length in (last..=ended - END.len()).chain([ended]) {
            std::fs::write(&path, &text[..length]).unwrap();
            let mut trace = ChromeTrace::resume(&path, &names[..1]).unwrap();
            assert_eq!(trace.origin_ns, origin);
            trace.write(&[span(origin + 5_000, Phase::Backward, "1B0")]).unwrap();
            trace.finish().unwrap();
            let again = parsed(&std::fs::read_to_string(&path).unwrap()).unwrap();
            let kept = if length < ended - END.len() { events.len() - 1 } else { events.len() };
            assert_eq!((&again[..kept], again.len()), (&events[..kept], kept + LANES.len() + 1), "{length}");
            assert_eq!(again.last().unwrap()["ts"], 5.0);
        }
        // No trace, or none of ours.
        for other in ["", "{\"traceEvents\":[]}", "[\n{}\n]\n"] {
            std::fs::write(&path, other).unwrap();
            ChromeTrace::resume(&path, &names).unwrap().finish().unwrap();
            assert_eq!(parsed(&std::fs::read_to_string(&path).unwrap()).unwrap().len(), first, "{other:?}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
