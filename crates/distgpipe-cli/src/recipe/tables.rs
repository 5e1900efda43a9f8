//! The published tables, as they are printed in their documents, and the recipe of each row.

use super::comparison::Metric;
use super::Recipe;
use crate::exit::usage;
use crate::report::{listed, nearest, unknown, NAMES_LISTED_MAX};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

const TEXT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tables.toml"));

/// A published table.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedTable {
    /// What `distgpipe recipe table` takes.
    pub name: String,
    /// The heading of the table in its document, or the sentence that introduces it.
    pub title: String,
    pub document: String,
    pub columns: Vec<String>,
    /// What columns measure. The others label the row, or quote somebody else.
    pub figures: BTreeMap<String, Metric>,
    /// What a reader of its figures should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    pub rows: Vec<TableRow>,
}

/// A row of a published table.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TableRow {
    /// One cell for each column of the table.
    pub cells: Vec<String>,
    /// The recipe that reproduces the row.
    #[serde(skip_serializing_if = "Option::is_none")]
    recipe: Option<String>,
    /// The recipes of single columns, where they differ.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    recipes: BTreeMap<String, String>,
    /// A model whose parameters are counted, in a row without a recipe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Its settings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub set: Vec<String>,
    /// Why there is no recipe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl TableRow {
    /// The recipe that reproduces a column of the row.
    pub fn recipe_of(&self, column: &str) -> Option<&str> {
        self.recipes.get(column).or(self.recipe.as_ref()).map(String::as_str)
    }

    /// All recipes of the row.
    pub fn recipes(&self) -> impl Iterator<Item = &str> {
        self.recipe.iter().chain(self.recipes.values()).map(String::as_str)
    }
}

impl PublishedTable {
    /// The recipes of all rows, each once, in the order of the rows.
    pub fn recipes(&self) -> Vec<&str> {
        let mut all: Vec<&str> = Vec::new();
        for recipe in self.rows.iter().flat_map(TableRow::recipes) {
            if !all.contains(&recipe) {
                all.push(recipe);
            }
        }
        all
    }

    /// The recipes that the speed-ups of these rows are relative to, and that are not among them.
    pub fn baselines(&self, rows: &[Recipe]) -> BTreeSet<String> {
        let speed_ups = self.figures.values().any(|&metric| metric == Metric::SpeedUp);
        let baselines = rows.iter().filter(|_| speed_ups).filter_map(|row| row.published.speed_up_to.clone());
        baselines.filter(|name| rows.iter().all(|row| row.name != *name)).collect()
    }

    /// What a column measures in the rows of a recipe: a column of scores has the Matthews correlation for CoLA.
    pub fn metric(&self, column: &str, recipe: Option<&Recipe>) -> Option<Metric> {
        match self.figures.get(column)? {
            Metric::Accuracy if recipe.is_some_and(|recipe| recipe.published.matthews.is_some()) => {
                Some(Metric::Matthews)
            }
            metric => Some(*metric),
        }
    }
}

#[derive(Deserialize)]
struct File {
    table: Vec<PublishedTable>,
}

/// All tables, in the order of their documents.
pub fn all() -> anyhow::Result<&'static [PublishedTable]> {
    static TABLES: OnceLock<Result<Vec<PublishedTable>, String>> = OnceLock::new();
    let parsed = TABLES.get_or_init(|| toml::from_str::<File>(TEXT).map(|file| file.table).map_err(|e| e.to_string()));
    parsed.as_deref().map_err(|why| anyhow::anyhow!("tables.toml: {why}"))
}

/// The tables that have rows of a recipe.
pub fn with_recipe(recipe: &str) -> anyhow::Result<impl Iterator<Item = &'static PublishedTable> + '_> {
    Ok(all()?.iter().filter(move |table| table.recipes().contains(&recipe)))
}

/// The table with this name, or with this title or a part of it.
pub fn find(wanted: &str) -> anyhow::Result<&'static PublishedTable> {
    let tables = all()?;
    if let Some(table) = tables.iter().find(|table| table.name == wanted) {
        return Ok(table);
    }
    let lower = wanted.to_lowercase();
    let named: Vec<&PublishedTable> = tables
        .iter()
        .filter(|table| !lower.trim().is_empty() && table.title.to_lowercase().contains(lower.trim()))
        .collect();
    match &named[..] {
        [table] => Ok(table),
        [] => {
            let unknown = unknown("table", wanted, nearest(wanted, tables.iter().map(|table| &table.name[..])));
            Err(usage(format!("{unknown} `distgpipe recipe tables` lists all {}", tables.len())))
        }
        several => {
            let names: Vec<String> = several.iter().map(|table| table.name.clone()).collect();
            let names = listed(&names, NAMES_LISTED_MAX);
            Err(usage(format!("several titles contain `{wanted}`: use the name of one of their tables: {names}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    #[test]
    fn every_row_has_all_cells_and_a_recipe_or_a_reason() {
        let tables = all().unwrap();
        // The documents have 28 tables with 161 rows, and one block of memory figures.
        assert_eq!((tables.len(), tables.iter().map(|table| table.rows.len()).sum::<usize>()), (29, 162));
        for table in tables {
            assert!(table.figures.keys().all(|column| table.columns.contains(column)), "{}", table.name);
            for row in &table.rows {
                assert_eq!(row.cells.len(), table.columns.len(), "{}: {:?}", table.name, row.cells);
                let ways = [row.recipes().count() > 0, row.model.is_some(), row.note.is_some()];
                assert_eq!(ways.iter().filter(|&&way| way).count(), 1, "{}: {:?}", table.name, row.cells);
                row.recipes().for_each(|name| drop(recipe::find(name).unwrap()));
            }
        }
        for recipe in recipe::all().unwrap() {
            assert!(with_recipe(&recipe.name).unwrap().next().is_some(), "{} is in no table", recipe.name);
        }
    }

    /// The figures of the recipes were typed, those of the tables copied from the documents.
    #[test]
    fn tables_and_recipes_quote_the_same_figures() {
        let number = |text: &str| {
            let digits: String = text.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
            digits.parse::<f64>().ok()
        };
        let mut compared = 0;
        for table in all().unwrap() {
            for row in &table.rows {
                for (column, cell) in table.columns.iter().zip(&row.cells) {
                    let Some(recipe) = row.recipe_of(column).map(|name| recipe::find(name).unwrap()) else { continue };
                    let Some(metric) = table.metric(column, Some(&recipe)) else { continue };
                    let Some(quoted) = number(cell) else { continue };
                    let same = recipe.published.figure(metric).and_then(|figure| number(&figure)) == Some(quoted);
                    // Where documents disagree, the recipe has one figure and quotes the other.
                    let other = recipe.published.also.iter().any(|text| text.contains(cell.as_str()));
                    assert!(same || other, "{}, {}: {column} is {cell}", table.name, recipe.name);
                    compared += 1;
                }
            }
        }
        assert!(compared > 250, "only {compared} figures were compared");
    }

    #[test]
    fn the_row_that_a_speed_up_is_relative_to_belongs_to_its_rows() {
        let baselines = |table: &str, rows: &[&str]| {
            let rows: Vec<Recipe> = rows.iter().map(|name| recipe::find(name).unwrap()).collect();
            find(table).unwrap().baselines(&rows).into_iter().collect::<Vec<_>>()
        };
        let averaged = "cifar10-mobilenet-pipeline-2-averaged";
        assert_eq!(baselines("separated-averagely", &[averaged]), ["cifar10-mobilenet-data-parallel-2"]);
        assert!(baselines("unet-speed", &["unet-speed-baseline", "unet-speed-pipeline-2"]).is_empty());
        assert!(baselines("roberta-throughput", &["rte-roberta-pipeline-2-batch-64"]).is_empty());
    }

    #[test]
    fn a_table_is_found_by_its_name_and_by_its_title() {
        assert_eq!(find("cola").unwrap().name, "cola");
        assert_eq!(find("For VGG13").unwrap().name, "time-vgg13");
        assert_eq!(find("u-net (5, 64) speed").unwrap().name, "unet-speed");
        let said = |wanted| find(wanted).unwrap_err().to_string();
        assert!(said("Ablation").contains("ablation, cifar10, cifar100"), "{}", said("Ablation"));
        assert!(said("unet-sped").contains("did you mean `unet-speed`?"), "{}", said("unet-sped"));
        assert!(said("").contains("`distgpipe recipe tables` lists all 29"), "{}", said(""));
    }
}
