//! Tables of Markdown files that are made from our figures. A file marks where they belong:
//!
//! ```text
//! <!-- recipe table unet-memory -->        one table
//! <!-- end -->
//! <!-- recipe tables -->                   all tables, with links to the recipes
//! <!-- end -->
//! ```

use super::measured::Measured;
use super::table_view::{Page, TableView};
use super::tables;

const START: &str = "<!-- recipe table";
const CLOSE: &str = " -->";
const END: &str = "<!-- end -->";

/// The text with all its marked tables made anew. It must mark at least one.
pub fn updated(text: &str, measured: &Measured) -> anyhow::Result<String> {
    let mut lines = text.lines();
    let (mut made, mut blocks) = (String::new(), 0);
    while let Some(line) = lines.next() {
        made += line;
        made.push('\n');
        let Some(name) = line.strip_prefix(START).and_then(|rest| rest.strip_suffix(CLOSE)) else { continue };
        blocks += 1;
        made.push('\n');
        made += &match name {
            "s" => all(measured)?,
            name => TableView::new(tables::find(name.trim())?, measured)?.markdown(Page::Single),
        };
        made += &format!("\n{END}\n");
        // Another mark before the end of this one means that the end is missing, and that there may be text in between.
        if lines.by_ref().find(|line| *line == END || line.starts_with(START)) != Some(END) {
            anyhow::bail!("`{line}` has no `{END}` after it, before the next mark");
        }
    }
    if blocks == 0 {
        anyhow::bail!("it has no line `{START} NAME{CLOSE}` where a table belongs");
    }
    Ok(made)
}

/// All tables with their titles, by document.
fn all(measured: &Measured) -> anyhow::Result<String> {
    let (mut parts, mut document) = (Vec::new(), "");
    for table in tables::all()? {
        let mut part = String::new();
        if table.document != document {
            document = &table.document;
            part += &format!("## {document}\n\n");
        }
        let view = TableView::new(table, measured)?.markdown(Page::All);
        part +=
            &format!("### {}\n\n`distgpipe recipe table {}`\n\n{view}", table.title.trim_end_matches('.'), table.name);
        parts.push(part);
    }
    Ok(parts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_tables_are_made_and_the_rest_stays() {
        let measured = Measured::committed().unwrap();
        let text = "before\n<!-- recipe table time-vgg13 -->\nold\n<!-- end -->\nafter\n";
        let made = updated(text, &measured).unwrap();
        assert!(
            made.starts_with("before\n<!-- recipe table time-vgg13 -->\n\n") && made.ends_with("<!-- end -->\nafter\n")
        );
        assert!(made.contains("| 0.704 |") && !made.contains("old"), "{made}");
        assert_eq!(updated(&made, &measured).unwrap(), made);
        let error = |text: &str| updated(text, &measured).unwrap_err().to_string();
        assert!(error("nothing\n").contains("no line `<!-- recipe table NAME -->`"));
        assert!(error("<!-- recipe table time-vgg13 -->\n").contains("no `<!-- end -->` after it"));
        assert!(error("<!-- recipe table time-vgg -->\n<!-- end -->\n").contains("did you mean"));
        let two = "<!-- recipe table time-vgg13 -->\nmy text\n<!-- recipe table rte -->\n<!-- end -->\n";
        assert!(error(two).contains("no `<!-- end -->` after it"));
    }
}
