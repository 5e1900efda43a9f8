//! The figures of links as a table, a picture and JSON.

use super::{BandwidthArgs, Link, Row};
use crate::report::table::{Side, Table};
use crate::report::{self, plot, units};
use distgpipe::comm::probe::bandwidth::Transfer;
use serde_json::json;

pub(super) fn print(links: &[Link], args: &BandwidthArgs) -> anyhow::Result<()> {
    if args.json {
        let links: Vec<_> = links.iter().map(link_json).collect();
        return report::print_json(&json!({ "seconds": args.seconds, "threads": args.threads, "links": links }));
    }
    let mut text = String::new();
    for link in links {
        let transport = link.transport.to_uppercase();
        let round_trip = units::seconds(link.round_trip_s);
        text.push_str(&format!("{} over {transport}, round trip {round_trip} without a tensor\n", link.name));
        text.push_str(&format!("{}\n", table(link)));
    }
    text.push_str(
        "there and back are bytes of tensors that arrived per second; ratio is the size of a tensor divided by its bytes on the wire\n",
    );
    if cfg!(debug_assertions) {
        text.push_str("these are the speeds of a debug build; a release build is faster\n");
    }
    report::print(&text)
}

fn table(link: &Link) -> String {
    let mut table = Table::new(&[
        ("codec", Side::Left),
        ("tensor", Side::Right),
        ("ratio", Side::Right),
        ("round trip", Side::Right),
        ("there", Side::Right),
        ("limited by", Side::Left),
        ("back", Side::Right),
        ("limited by", Side::Left),
    ]);
    for row in &link.rows {
        let rate = |transfer: &Transfer| format!("{}/s", units::bytes(transfer.tensor_bytes_per_s()));
        table.row(vec![
            row.codec.to_string(),
            binary(row.tensor_bytes),
            format!("{:.2}", row.tensor_bytes as f64 / row.there.frame_bytes.max(1.0)),
            units::seconds(row.round_trip_s),
            rate(&row.there),
            row.there.limit().to_string(),
            rate(&row.back),
            row.back.limit().to_string(),
        ]);
    }
    table.render()
}

/// A multiple of 4 KiB, in powers of 1024.
fn binary(bytes: u64) -> String {
    match bytes >> 20 {
        0 => format!("{} KiB", bytes >> 10),
        mib if mib << 20 == bytes => format!("{mib} MiB"),
        _ => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
    }
}

fn link_json(link: &Link) -> serde_json::Value {
    let measurements: Vec<_> = link.rows.iter().map(row_json).collect();
    json!({
        "name": link.name,
        "transport": link.transport,
        "round_trip_s": link.round_trip_s,
        "measurements": measurements,
    })
}

fn row_json(row: &Row) -> serde_json::Value {
    let direction = |transfer: &Transfer| {
        json!({
            "messages": transfer.messages,
            "seconds": transfer.seconds,
            "tensor_bytes_per_s": transfer.tensor_bytes_per_s(),
            "wire_bytes_per_s": transfer.wire_bytes_per_s(),
            "frame_bytes": transfer.frame_bytes,
            "encode_s": transfer.encode_s,
            "decode_s": transfer.decode_s,
            "copy_s": transfer.copy_s,
            "limit": transfer.limit().to_string(),
        })
    };
    json!({
        "codec": row.codec,
        "tensor_bytes": row.tensor_bytes,
        "round_trip_s": row.round_trip_s,
        "there": direction(&row.there),
        "back": direction(&row.back),
    })
}

/// Throughput in the slower direction over size, a line for each link and codec.
pub(super) fn plot(links: &[Link]) -> String {
    let mut points: Vec<plot::Point> = Vec::new();
    let mut family = 0;
    for link in links {
        for rows in link.rows.chunk_by(|a, b| a.codec == b.codec) {
            for (i, row) in rows.iter().enumerate() {
                let label = match i + 1 == rows.len() {
                    true if links.len() > 1 => format!("{} {}", row.codec, link.transport.to_uppercase()),
                    true => row.codec.to_string(),
                    false => String::new(),
                };
                let slower = row.there.tensor_bytes_per_s().min(row.back.tensor_bytes_per_s());
                points.push(plot::Point { label, family, x: row.tensor_bytes as f64, y: slower });
            }
            family += 1;
        }
    }
    let names: Vec<&str> = links.iter().map(|link| link.name.as_str()).collect();
    let text = plot::Text {
        title: "bytes of tensors received per second over their size",
        source: &format!("between this process and {}; the slower direction", names.join(" and ")),
        better: "up",
        x: "size of a tensor",
        y: "bytes per second",
        x_tick: |power| binary(1 << power.clamp(0, 62)),
        y_tick: |power| units::bytes(10f64.powi(power)),
        joins_best: false,
    };
    plot::draw(&points, &text)
}
