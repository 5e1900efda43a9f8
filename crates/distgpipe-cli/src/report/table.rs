//! Text tables with columns as wide as their widest cell.

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// A table with a heading row.
pub struct Table {
    columns: Vec<(String, Side)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these columns.
    pub fn new(columns: &[(&str, Side)]) -> Self {
        Table { columns: columns.iter().map(|(name, side)| ((*name).to_owned(), *side)).collect(), rows: Vec::new() }
    }

    /// Adds a row. Missing cells stay empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The heading and the rows, one line each.
    pub fn render(&self) -> String {
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let lines: Vec<&Vec<String>> = std::iter::once(&heading).chain(&self.rows).collect();
        let width = |column: usize| {
            lines.iter().filter_map(|cells| cells.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = String::new();
        for cells in lines {
            let mut line = String::new();
            for ((i, (_, side)), &width) in self.columns.iter().enumerate().zip(&widths) {
                let cell = cells.get(i).map(String::as_str).unwrap_or_default();
                let gap = if i == 0 { "" } else { "  " };
                line.push_str(&match side {
                    Side::Left => format!("{gap}{cell:<width$}"),
                    Side::Right => format!("{gap}{cell:>width$}"),
                });
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&[("name", Side::Left), ("bytes", Side::Right)]);
        table.row(vec!["a → b".into(), "1".into()]);
        table.row(vec!["c".into(), "123456".into()]);
        assert_eq!(table.render(), "name    bytes\na → b       1\nc      123456\n");
    }
}
