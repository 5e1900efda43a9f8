//! A published table with our figures beside its own, for people and for Markdown files.

use super::comparison::Metric;
use super::measured::{Figure, Measured, MeasuredRow, Measurements};
use super::requirements::needs;
use super::tables::{PublishedTable, TableRow};
use super::{find, Recipe};
use crate::config::{model, ExportedFlags};
use crate::report::table::{Side, Table};
use serde::Serialize;
use std::collections::HashSet;

/// What a cell without a figure of ours shows.
const NONE: &str = "–";
/// The longest line of text in a Markdown file.
const MARKDOWN_COLUMNS: usize = 128;

/// A published table and our figures.
#[derive(Serialize)]
pub struct TableView<'a> {
    table: &'a PublishedTable,
    /// Cells that are the same in all rows: column and text.
    common: Vec<(String, String)>,
    columns: Vec<String>,
    rows: Vec<ViewRow>,
    /// Where our figures come from, and how they deviate from the published experiment.
    sources: Vec<Source>,
}

/// A row of the view.
#[derive(Serialize)]
struct ViewRow {
    cells: Vec<String>,
    /// Why there is no figure of ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_measured: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recipe: Option<String>,
    /// Not a row of ours that the published table does not have.
    #[serde(skip)]
    coverage: Option<Coverage>,
}

/// How many of a row's published figures have one of ours beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// All of them, measured or counted.
    Complete,
    /// Some of them.
    Partial,
    /// Those that there are come from a simulation.
    Simulated,
    Nothing,
}

impl Coverage {
    fn of(figures: &[Option<Ours<'_>>], not_measured: Option<&str>) -> Self {
        let runs = || figures.iter().flatten().filter_map(|figure| figure.from);
        let simulated = runs().any(|(_, row)| row.is_simulated());
        let measured = runs().any(|(_, row)| !row.is_simulated());
        match (not_measured, measured, simulated) {
            (None, _, false) => Coverage::Complete,
            (_, true, _) => Coverage::Partial,
            (_, false, true) => Coverage::Simulated,
            (Some(_), false, false) => Coverage::Nothing,
        }
    }
}

/// Figures of one file and one machine.
#[derive(Serialize)]
struct Source {
    /// The table that was run.
    table: String,
    file: String,
    machine: String,
    /// What measured them. Rows can be added to a file later, each by a command of its own.
    commands: Vec<String>,
    /// Sentences, and the rows they are about; no rows if they are about all of them.
    deviations: Vec<(String, Vec<String>)>,
}

/// Where a table is printed in Markdown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Page {
    /// Alone.
    Single,
    /// With all other tables, in the directory of the recipes, to which it links.
    All,
}

/// Which columns are shown.
struct Shown {
    /// The columns of the published table.
    columns: Vec<usize>,
    /// For each column of the published table, whether one of ours follows it.
    ours: Vec<bool>,
}

impl Shown {
    /// The cells of a row: published ones, and ours where there is a column for them.
    fn cells(&self, published: impl Fn(usize) -> String, ours: impl Fn(usize) -> Option<String>) -> Vec<String> {
        let mut cells = Vec::new();
        for &i in &self.columns {
            cells.push(published(i));
            cells.extend(self.ours[i].then(|| ours(i).unwrap_or_else(|| NONE.to_owned())));
        }
        cells
    }
}

impl<'a> TableView<'a> {
    /// Puts our figures beside the published ones.
    pub fn new(table: &'a PublishedTable, measured: &Measured) -> anyhow::Result<Self> {
        let speeds = measured.speeds(&table.name, &table.recipes());
        let rows = table.rows.iter().map(|row| Measuring { table, measured, speeds, row }.figures());
        let figures: Vec<Vec<Option<Ours<'_>>>> = rows.collect::<Result<_, _>>()?;
        let own = measured.table(&table.name);
        let extra: Vec<&MeasuredRow> =
            own.iter().flat_map(|file| &file.rows).filter(|row| row.label.is_some()).collect();
        let all = 0..table.columns.len();
        // Labels that are the same in all rows go above the table.
        let same = |i: &usize| {
            !table.figures.contains_key(&table.columns[*i])
                && table.rows.len() > 1
                && table.rows.iter().all(|row| row.cells[*i] == table.rows[0].cells[*i])
        };
        let has_ours = |i: usize| {
            figures.iter().any(|row| row[i].is_some()) || extra.iter().any(|row| extra_figure(table, i, row).is_some())
        };
        let shown =
            Shown { columns: all.clone().filter(|i| !same(i)).collect(), ours: all.clone().map(has_ours).collect() };
        let mut rows = Vec::new();
        for (row, figures) in table.rows.iter().zip(&figures) {
            let not_measured = not_measured(table, measured, row, figures)?;
            rows.push(ViewRow {
                cells: shown.cells(|i| row.cells[i].clone(), |i| Some(figures[i].as_ref()?.text.clone())),
                recipe: row.recipes().next().map(str::to_owned),
                coverage: Some(Coverage::of(figures, not_measured.as_deref())),
                not_measured,
            });
        }
        for row in &extra {
            let label = row.label.as_ref().map(|label| format!("not published: {label}"));
            let first = shown.columns.first().copied();
            let published = |i| label.clone().filter(|_| first == Some(i)).unwrap_or_else(|| NONE.to_owned());
            let cells = shown.cells(published, |i| extra_figure(table, i, row));
            rows.push(ViewRow { cells, not_measured: None, recipe: None, coverage: None });
        }
        Ok(TableView {
            table,
            common: all.filter(same).map(|i| (table.columns[i].clone(), table.rows[0].cells[i].clone())).collect(),
            columns: shown.cells(|i| table.columns[i].clone(), |_| Some("ours".to_owned())),
            rows,
            sources: sources(table, measured, figures.iter().flatten().flatten(), &extra),
        })
    }

    /// How many rows of the published table are covered like this.
    pub fn rows_with(&self, coverage: Coverage) -> usize {
        self.rows.iter().filter(|row| row.coverage == Some(coverage)).count()
    }

    /// The table as text, with its title, and what differs.
    pub fn text(&self) -> String {
        let any_missing = self.rows.iter().any(|row| row.not_measured.is_some());
        let mut columns: Vec<(&str, Side)> = self.columns.iter().map(|name| (&name[..], Side::Left)).collect();
        if any_missing {
            columns.push(("", Side::Left));
        }
        let mut table = Table::new(&columns);
        for row in &self.rows {
            let mut cells = row.cells.clone();
            cells.extend(row.not_measured.clone());
            table.row(cells);
        }
        let sources: String = self.sources.iter().map(Source::text).collect();
        let note = self.table.note.as_ref().map(|note| format!("\n{note}\n")).unwrap_or_default();
        format!("{}\n\n{}{note}{sources}", self.heading(), table.render())
    }

    /// The table in Markdown.
    pub fn markdown(&self, page: Page) -> String {
        let with_recipes = page == Page::All;
        let any_missing = self.rows.iter().any(|row| row.not_measured.is_some());
        let escaped = |text: &str| text.replace('|', "\\|").replace("[paper][]", "paper");
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut heading: Vec<String> = self.columns.iter().map(|name| escaped(name)).collect();
        heading.extend(any_missing.then(|| "not measured".to_owned()));
        heading.extend(with_recipes.then(|| "recipe".to_owned()));
        let mut text = line(heading.clone()) + &line(vec!["---".to_owned(); heading.len()]);
        for row in &self.rows {
            let mut cells: Vec<String> = row.cells.iter().map(|cell| escaped(cell)).collect();
            if any_missing {
                let why = row.not_measured.as_deref().unwrap_or_default();
                cells.push(why.trim_start_matches("not measured: ").to_owned());
            }
            if with_recipes {
                cells.push(row.recipe.as_ref().map_or(NONE.to_owned(), |name| format!("[`{name}`]({name}.toml)")));
            }
            text += &line(cells);
        }
        let common = self.common();
        let common = if common.is_empty() { String::new() } else { wrapped(&format!("{common}.\n\n")) };
        let note = self.table.note.as_ref().map(|note| wrapped(&format!("\n{note}\n"))).unwrap_or_default();
        let sources = self.sources.iter().map(|source| match with_recipes && source.table != self.table.name {
            // Where all tables are on one page, the other one is too.
            true => format!("\nOurs: as under `distgpipe recipe table {}`.\n", source.table),
            false => wrapped(&source.text()),
        });
        format!("{common}{text}{note}{}", sources.collect::<String>())
    }

    fn heading(&self) -> String {
        let place = format!("{}\n\"{}\"", self.table.title, self.table.document);
        match self.common() {
            common if common.is_empty() => place,
            common => format!("{place}; {common}"),
        }
    }

    fn common(&self) -> String {
        let all: Vec<String> = self.common.iter().map(|(column, cell)| format!("{column}: {cell}")).collect();
        all.join("; ")
    }
}

impl Source {
    /// Where the figures come from, and what differs.
    fn text(&self) -> String {
        let made_by = match &self.commands[..] {
            [command] => command.clone(),
            several => format!("{} commands, listed in the file", several.len()),
        };
        let mut text = format!("\nOurs: {}; {}; produced by {made_by}.", self.file, self.machine);
        text += if self.deviations.is_empty() { "\n" } else { " What differs:\n\n" };
        for (sentence, rows) in &self.deviations {
            let rows = if rows.is_empty() { String::new() } else { format!(" (rows: {})", rows.join("; ")) };
            text += &format!("- {sentence}{rows}\n");
        }
        text
    }
}

/// Text with its long lines broken between words. Lines of a list stay in their item.
fn wrapped(text: &str) -> String {
    let mut made = String::new();
    for line in text.lines() {
        let indent = if line.starts_with("- ") { "  " } else { "" };
        let mut columns = 0;
        for word in line.split(' ') {
            let length = word.chars().count();
            if columns > 0 && columns + 1 + length > MARKDOWN_COLUMNS {
                made += &format!("\n{indent}{word}");
                columns = indent.len() + length;
            } else {
                let gap = if columns > 0 { " " } else { "" };
                made += &format!("{gap}{word}");
                columns += gap.len() + length;
            }
        }
        made.push('\n');
    }
    made
}

/// A figure of ours as it is printed, and the run that it is from; none for what is counted.
struct Ours<'a> {
    text: String,
    from: Option<(&'a Measurements, &'a MeasuredRow)>,
}

/// Why a row has no figure of ours, or not all of them. Parameters are counted, which is all there is to a row with a model.
fn not_measured(
    table: &PublishedTable,
    measured: &Measured,
    row: &TableRow,
    figures: &[Option<Ours<'_>>],
) -> anyhow::Result<Option<String>> {
    if row.model.is_some() {
        return Ok(None);
    }
    let recipe = row.recipes().next().map(find).transpose()?;
    let (Some(recipe), None) = (recipe, &row.note) else { return Ok(Some(row.note.clone().unwrap_or_default())) };
    // Needs, and the columns that have them.
    let mut missing: Vec<(String, Vec<&str>)> = Vec::new();
    for ((column, cell), figure) in table.columns.iter().zip(&row.cells).zip(figures) {
        let of_column = row.recipe_of(column).map(find).transpose()?;
        let metric = of_column.as_ref().and_then(|recipe| table.metric(column, Some(recipe)));
        let (Some(of_column), Some(metric), None) = (of_column, metric, figure) else { continue };
        let counts = match metric {
            // It follows from the throughput, if it is relative to anything.
            Metric::SpeedUp => false,
            _ => cell.contains(|c: char| c.is_ascii_digit()),
        };
        if counts {
            let needed = needs(&of_column, metric);
            match missing.iter_mut().find(|(known, _)| *known == needed) {
                Some((_, columns)) => columns.push(column),
                None => missing.push((needed, vec![column])),
            }
        }
    }
    let nothing = figures.iter().flatten().all(|figure| figure.from.is_none());
    let skipped = row.recipes().find_map(|recipe| measured.skipped(&table.name, recipe)).filter(|_| nothing);
    let why = match (skipped, &missing[..]) {
        (Some(why), _) => why.to_owned(),
        // Nothing to compare with was published.
        (None, []) if nothing => format!("needs {}", needs(&recipe, Metric::Throughput)),
        (None, []) => return Ok(None),
        (None, [(needed, _)]) if nothing => format!("needs {needed}"),
        (None, several) => {
            let one = |(needed, columns): &(String, Vec<&str>)| {
                let verb = if columns.len() == 1 { "needs" } else { "need" };
                format!("{} {verb} {needed}", columns.join(" and "))
            };
            several.iter().map(one).collect::<Vec<_>>().join(". ")
        }
    };
    Ok(Some(format!("not measured: {why}")))
}

/// The figure of a row that the published table does not have.
fn extra_figure(table: &PublishedTable, column: usize, row: &MeasuredRow) -> Option<String> {
    let metric = *table.figures.get(&table.columns[column])?;
    row.text(metric)
}

/// One row of a table, whose figures are looked up.
struct Measuring<'a> {
    table: &'a PublishedTable,
    measured: &'a Measured,
    /// The file of all speeds of the table.
    speeds: Option<&'a Measurements>,
    row: &'a TableRow,
}

impl<'a> Measuring<'a> {
    /// Our figure in each column of the table.
    fn figures(&self) -> anyhow::Result<Vec<Option<Ours<'a>>>> {
        self.table.columns.iter().map(|column| self.figure(column)).collect()
    }

    fn figure(&self, column: &str) -> anyhow::Result<Option<Ours<'a>>> {
        let (name, table) = (self.row.recipe_of(column), &self.table.name);
        let recipe = name.map(find).transpose()?;
        let Some(metric) = self.table.metric(column, recipe.as_ref()) else { return Ok(None) };
        if metric == Metric::Parameters {
            return self.parameters(recipe.as_ref());
        }
        let (Some(recipe), Some(name)) = (recipe, name) else { return Ok(None) };
        if metric == Metric::SpeedUp {
            // Rows without one, such as those that were out of memory, have no baseline either.
            if recipe.published.speed_up.is_none() {
                return Ok(None);
            }
            let baseline = recipe.published.speed_up_to.as_ref().unwrap_or(&recipe.name);
            let found = self.speeds.and_then(|file| Some((file, file.speed_up(name, baseline)?)));
            let ours =
                |(file, (figure, row)): (_, (Figure, _))| Ours { text: figure.text(metric), from: Some((file, row)) };
            return Ok(found.map(ours));
        }
        // Speeds beside speed-ups are those that give them.
        let compared = self.table.figures.values().any(|&metric| metric == Metric::SpeedUp);
        let only = self.speeds.filter(|_| metric == Metric::Throughput && compared);
        // One run may have the speed of a row, and another one its score.
        let rows =
            || self.measured.rows(table, name).filter(|(file, _)| only.is_none_or(|only| only.table == file.table));
        let found = rows().find_map(|(file, row)| Some(Ours { text: row.text(metric)?, from: Some((file, row)) }));
        Ok(found.or_else(|| {
            let from = rows().find(|(_, row)| row.is_out_of_memory())?;
            Some(Ours { text: "out of memory".to_owned(), from: Some(from) })
        }))
    }

    /// Parameters are counted: no run is needed.
    fn parameters(&self, recipe: Option<&Recipe>) -> anyhow::Result<Option<Ours<'a>>> {
        let (name, set) = match (recipe, &self.row.model) {
            (Some(recipe), _) => (recipe.run.model.as_deref().unwrap_or_default(), &recipe.run.set),
            (None, Some(name)) => (&name[..], &self.row.set),
            (None, None) => return Ok(None),
        };
        let model = model("--model", name, set, ExportedFlags::default())?;
        let figure = Figure { mean: model.parameters() as f64, deviation: None, simulated: false };
        Ok(Some(Ours { text: figure.text(Metric::Parameters), from: None }))
    }
}

/// The files whose figures the view shows, each with its deviations.
fn sources<'a>(
    table: &PublishedTable,
    measured: &'a Measured,
    figures: impl Iterator<Item = &'a Ours<'a>>,
    extra: &[&'a MeasuredRow],
) -> Vec<Source> {
    let own = measured.table(&table.name);
    let extra = own.into_iter().flat_map(|own| extra.iter().map(move |row| (own, *row)));
    let shown = figures.filter_map(|figure| figure.from).chain(extra);
    let source = |(file, rows): (&Measurements, Vec<&MeasuredRow>)| {
        let mut deviations: Vec<(String, Vec<String>)> = Vec::new();
        for row in &rows {
            let name = row.recipe.clone().or_else(|| row.label.clone()).unwrap_or_default();
            for sentence in &row.deviations {
                match deviations.iter_mut().find(|(known, _)| known == sentence) {
                    Some((_, names)) => names.push(name.clone()),
                    None => deviations.push((sentence.clone(), vec![name.clone()])),
                }
            }
        }
        for (_, names) in &mut deviations {
            if names.len() == rows.len() {
                names.clear();
            }
        }
        let machine = rows.first().map_or(&file.machine[..], |row| file.origin(row).0).to_owned();
        let mut commands: Vec<String> = rows.iter().map(|row| file.origin(row).1.to_owned()).collect();
        let mut known = HashSet::new();
        commands.retain(|command| known.insert(command.clone()));
        let table = file.table.clone();
        Source { file: format!("{}/{table}.json", measured.place), table, machine, commands, deviations }
    };
    by_source(shown).into_iter().map(source).collect()
}

/// Rows with the file that they are from.
type RowsOfFile<'a> = (&'a Measurements, Vec<&'a MeasuredRow>);

/// The rows of each file and machine. Two rows of one recipe are in different groups, so that its name says which is meant.
fn by_source<'a>(shown: impl Iterator<Item = (&'a Measurements, &'a MeasuredRow)>) -> Vec<RowsOfFile<'a>> {
    let mut by_command: Vec<RowsOfFile<'_>> = Vec::new();
    for (file, row) in shown {
        let same = |(known, rows): &&mut RowsOfFile<'_>| {
            known.table == file.table && rows.first().is_none_or(|first| known.origin(first) == file.origin(row))
        };
        match by_command.iter_mut().find(same) {
            Some((_, rows)) if rows.iter().any(|known| std::ptr::eq(*known, row)) => {}
            Some((_, rows)) => rows.push(row),
            None => by_command.push((file, vec![row])),
        }
    }
    let mut groups: Vec<RowsOfFile<'_>> = Vec::new();
    for (file, rows) in by_command {
        let machine = rows.first().map(|row| file.origin(row).0);
        let joins = |(known, others): &&mut RowsOfFile<'_>| {
            let named =
                |row: &MeasuredRow| others.iter().any(|other| other.recipe.is_some() && other.recipe == row.recipe);
            known.table == file.table
                && others.first().map(|row| known.origin(row).0) == machine
                && !rows.iter().any(|row| named(row))
        };
        match groups.iter_mut().find(joins) {
            Some((_, others)) => others.extend(rows),
            None => groups.push((file, rows)),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::measured::{MeasuredRun, Origin, Outcome};
    use crate::recipe::tables;
    use std::collections::BTreeMap;
    use std::path::Path;

    #[test]
    fn long_lines_are_broken_between_words() {
        let long = format!("- {}end\nshort\n", "word ".repeat(60));
        let made = wrapped(&long);
        assert!(made.lines().all(|line| line.chars().count() <= MARKDOWN_COLUMNS), "{made}");
        assert!(made.lines().skip(1).take(2).all(|line| line.starts_with("  word")) && made.ends_with("short\n"));
        assert_eq!(made.split_whitespace().collect::<Vec<_>>(), long.split_whitespace().collect::<Vec<_>>());
    }

    /// The published row was out of memory, so that it has no speed-up to compare with. What it needs for its error is said.
    #[test]
    fn a_row_without_a_published_speed_up_has_none() {
        let row = |recipe: &str, rate: f64| MeasuredRow {
            recipe: Some(recipe.to_owned()),
            runs: vec![MeasuredRun::new(0, None, BTreeMap::from([(Metric::Throughput, rate)]))],
            ..MeasuredRow::default()
        };
        let table = tables::find("resnet101-imagenet").unwrap();
        let name = |batch: &str| format!("imagenet-resnet101-data-parallel-{batch}");
        let file = Measurements {
            table: table.name.clone(),
            machine: String::new(),
            version: String::new(),
            command: String::new(),
            rows: vec![row(&name("256"), 20.0), row(&name("1k"), 30.0), row(&name("4k"), 40.0)],
        };
        let measured = Measured::of(Path::new("mine"), file);
        let view = TableView::new(table, &measured).unwrap();
        let ours = |row: usize| [6, 8].map(|cell| &view.rows[row].cells[cell][..]);
        assert_eq!([ours(2), ours(3), ours(4)], [["20.00/s", "1.000×"], ["30.00/s", "1.500×"], ["40.00/s", "–"]]);
        assert_eq!(
            view.rows[3].not_measured.as_deref(),
            Some(
                "not measured: Top-1 error (%) needs ImageNet and a CPU (`--device cpu`) or a GPU (`--device cuda:0`)"
            )
        );
        assert_eq!(view.rows[4].not_measured, None);
    }

    /// A row with a speed and no score once counted as measured.
    #[test]
    fn a_row_is_complete_with_all_of_its_figures() {
        let table = tables::find("resnet101-imagenet").unwrap();
        let name = |batch: &str| format!("imagenet-resnet101-data-parallel-{batch}");
        let row = |batch: &str, outcome, figures: &[(Metric, f64)]| MeasuredRow {
            recipe: Some(name(batch)),
            runs: vec![MeasuredRun { outcome, ..MeasuredRun::new(0, None, figures.iter().copied().collect()) }],
            ..MeasuredRow::default()
        };
        let (speed, score) = ((Metric::Throughput, 20.0), (Metric::Error, 22.0));
        let covered = |rows| {
            let (machine, version, command) = Default::default();
            let file = Measurements { table: table.name.clone(), machine, version, command, rows };
            let view = TableView::new(table, &Measured::of(Path::new("mine"), file)).unwrap();
            [Coverage::Complete, Coverage::Partial, Coverage::Simulated].map(|coverage| view.rows_with(coverage))
        };
        // The published row with a batch of 4k has no figures, so that whatever was measured is all.
        let rows = |one: &[(Metric, f64)], other| {
            let first = row("256", Outcome::Complete, one);
            vec![first, row("1k", other, &[speed]), row("4k", Outcome::Complete, &[speed])]
        };
        assert_eq!(covered(rows(&[speed, score], Outcome::Complete)), [2, 1, 0]);
        assert_eq!(covered(rows(&[speed], Outcome::Complete)), [1, 2, 0]);
        assert_eq!(covered(rows(&[score], Outcome::Simulated)), [1, 1, 1]);
    }

    /// A table once showed a rate of one file beside the speed-up of another one.
    #[test]
    fn printed_rates_give_the_printed_speed_ups() {
        let measured = Measured::committed().unwrap();
        let number = |text: &str| {
            let text = text.trim_end_matches(" (simulated)").trim_end_matches("/s").trim_end_matches('×');
            text.split(" ± ").next().unwrap().parse::<f64>().unwrap()
        };
        let mut compared = 0;
        for table in tables::all().unwrap() {
            let column =
                |wanted: Metric| table.columns.iter().position(|name| table.figures.get(name) == Some(&wanted));
            let (Some(rate), Some(speed_up)) = (column(Metric::Throughput), column(Metric::SpeedUp)) else { continue };
            let speeds = measured.speeds(&table.name, &table.recipes());
            let figures = table.rows.iter().map(|row| Measuring { table, measured: &measured, speeds, row }.figures());
            let figures: Vec<Vec<Option<Ours<'_>>>> = figures.collect::<Result<_, _>>().unwrap();
            for (row, printed) in table.rows.iter().zip(&figures) {
                let Some(printed_speed_up) = &printed[speed_up] else { continue };
                let name = row.recipe_of(&table.columns[speed_up]).unwrap();
                let baseline = find(name).unwrap().published.speed_up_to.unwrap_or(name.to_owned());
                let of_baseline =
                    table.rows.iter().position(|row| row.recipe_of(&table.columns[rate]) == Some(&baseline[..]));
                let of_baseline = match of_baseline {
                    Some(row) => figures[row][rate].as_ref().unwrap().text.clone(),
                    // It is in the file, and not in the published table.
                    None => speeds.unwrap().row(&baseline).unwrap().text(Metric::Throughput).unwrap(),
                };
                let expected = number(&printed[rate].as_ref().unwrap().text) / number(&of_baseline);
                let got = number(&printed_speed_up.text);
                assert!((got - expected).abs() < 0.001 + 0.001 * expected, "{}, {name}: {got} {expected}", table.name);
                compared += 1;
            }
        }
        assert!(compared > 20, "only {compared} speed-ups");
    }

    /// A table that was run has the reason of a row that could not be.
    #[test]
    fn a_row_that_was_skipped_says_why() {
        let table = tables::find("unet-speed").unwrap();
        let skipped = MeasuredRow {
            recipe: Some("unet-speed-pipeline-1".to_owned()),
            skipped: Some("it ran out of patience".to_owned()),
            ..MeasuredRow::default()
        };
        let (machine, version, command) = Default::default();
        let file = Measurements { table: table.name.clone(), machine, version, command, rows: vec![skipped] };
        let view = TableView::new(table, &Measured::of(Path::new("mine"), file)).unwrap();
        let why =
            |name: &str| view.rows.iter().find(|row| row.recipe.as_deref() == Some(name)).unwrap().not_measured.clone();
        assert_eq!(why("unet-speed-pipeline-1").unwrap(), "not measured: it ran out of patience");
        assert_eq!(why("unet-speed-baseline").unwrap(), "not measured: needs a GPU");
    }

    /// Rows that were added one by one to a file are told together; a recipe's speed and its score from other runs are not.
    #[test]
    fn sources_are_files_and_machines() {
        let row = |recipe: &str, machine: &str, command: &str| {
            let (machine, command) = (machine.to_owned(), command.to_owned());
            let added = Some(Origin { machine, version: String::new(), command });
            MeasuredRow { recipe: Some(recipe.to_owned()), added, ..MeasuredRow::default() }
        };
        let rows = vec![
            row("x", "gpu", "speeds"),
            row("y", "gpu", "speeds"),
            row("x", "gpu", "score of x"),
            row("y", "gpu", "score of y"),
            row("z", "cpu", "z"),
        ];
        let (machine, version, command) = Default::default();
        let file = Measurements { table: String::new(), machine, version, command, rows };
        // As a table has them: the score of a recipe before its speed.
        let shown = [2, 0, 3, 1, 4, 0].map(|at| (&file, &file.rows[at]));
        let groups = by_source(shown.into_iter())
            .into_iter()
            .map(|(_, rows)| rows.iter().map(|row| row.added.as_ref().unwrap().command.clone()).collect::<Vec<_>>());
        assert_eq!(groups.collect::<Vec<_>>(), [vec!["score of x", "score of y"], vec!["speeds"; 2], vec!["z"]]);
    }

    /// No figure of ours appears without a file: with no files at all, only parameters are there.
    #[test]
    fn without_files_only_what_is_counted_is_ours() {
        for table in tables::all().unwrap() {
            let view = TableView::new(table, &Measured::default()).unwrap();
            assert!(view.sources.is_empty(), "{}", table.name);
            let counted = table.figures.values().any(|&metric| metric == Metric::Parameters);
            assert_eq!(view.columns.contains(&"ours".to_owned()), counted, "{}", table.name);
            for (row, published) in view.rows.iter().zip(&table.rows) {
                assert_eq!(row.not_measured.is_none(), published.model.is_some(), "{}: {:?}", table.name, row.cells);
            }
        }
    }
}
