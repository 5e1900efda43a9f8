//! Parameter groups and freezing: which learning rate and weight decay each parameter has, and which are not trained.
//!
//! Groups name parameters by pattern, such as `features.*` or `*.bias`: `*` stands for any characters, `?` for one. The
//! patterns, not the parameters, travel in the job. Each worker resolves them for the parameters it holds, and the driver
//! resolves the same patterns to know which parameters have optimizer state.

use glob::{MatchOptions, Pattern, PatternError};
use serde::{Deserialize, Serialize};

/// How many names an error suggests.
const SUGGESTIONS: usize = 3;

/// Settings of the parameters whose names match a pattern; see [`Builder::parameter_group`].
///
/// [`Builder::parameter_group`]: crate::Builder::parameter_group
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParameterGroup {
    /// Matches the whole name of a parameter: `*` stands for any characters, `?` for one.
    pattern: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rate_factor: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weight_decay: Option<f64>,
}

impl ParameterGroup {
    /// The parameters whose names match a pattern, such as `features.*` or `*.bias`. `*` stands for any characters,
    /// including dots, and `?` for one. Without further calls the group changes nothing.
    pub fn new(pattern: impl Into<String>) -> Self {
        ParameterGroup { pattern: pattern.into(), rate_factor: None, weight_decay: None }
    }

    /// Multiplies the learning rate of each update by this factor, at least 0.
    pub fn rate_factor(mut self, factor: f64) -> Self {
        self.rate_factor = Some(factor);
        self
    }

    /// Replaces the optimizer's weight decay: at least 0.
    pub fn weight_decay(mut self, decay: f64) -> Self {
        self.weight_decay = Some(decay);
        self
    }
}

/// Why parameter groups or frozen parameters do not fit a model.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterGroupError {
    /// The pattern cannot be parsed.
    #[error(
        "{option}: `{pattern}` is not a pattern: {why}; use `*` for any characters and `?` for one, as in `features.*`"
    )]
    Pattern {
        /// The option that has the pattern.
        option: &'static str,
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        why: String,
    },
    /// No parameter has a matching name.
    #[error("{option}: no parameter matches `{pattern}`; parameters have names such as {closest}")]
    NoMatch {
        /// The option that has the pattern.
        option: &'static str,
        /// The pattern.
        pattern: String,
        /// Names of parameters that resemble the pattern.
        closest: String,
    },
    /// Every parameter is frozen.
    #[error(
        "`Builder::freeze`: {patterns} freezes all {parameters} parameters, so there is nothing to train: freeze fewer"
    )]
    AllFrozen {
        /// The patterns that were given.
        patterns: String,
        /// The number of parameters of the model.
        parameters: usize,
    },
    /// A factor or a weight decay is out of range.
    #[error("`Builder::parameter_group`: `{pattern}`: expected a {what} of at least 0, got {got}")]
    Range {
        /// The pattern of the group.
        pattern: String,
        /// The setting.
        what: &'static str,
        /// The number that was given.
        got: f64,
    },
    /// A group has a weight decay, which the model's own optimizer does not take.
    #[error("`Builder::parameter_group`: `{pattern}`: the optimizer of `Model::with_optimizer` decides its weight decay itself: give the group a rate factor only")]
    OwnOptimizer {
        /// The pattern of the group.
        pattern: String,
    },
}

/// The settings of one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ParameterSettings {
    pub rate_factor: f64,
    /// Replaces the optimizer's, if there is one.
    pub weight_decay: Option<f64>,
}

/// The groups and the frozen parameters of a run, with their patterns parsed.
#[derive(Clone, Debug, Default)]
pub(crate) struct ParameterGroups {
    groups: Vec<(Pattern, ParameterGroup)>,
    frozen: Vec<Pattern>,
}

impl ParameterGroups {
    /// Parses the patterns and checks the numbers. `frozen` are patterns of parameters that are not trained.
    pub fn new(groups: &[ParameterGroup], frozen: &[String]) -> Result<Self, ParameterGroupError> {
        let group = |group: &ParameterGroup| {
            for (what, number) in [("rate factor", group.rate_factor), ("weight decay", group.weight_decay)] {
                if let Some(got) = number.filter(|number| !(number.is_finite() && *number >= 0.0)) {
                    return Err(ParameterGroupError::Range { pattern: group.pattern.clone(), what, got });
                }
            }
            Ok((parsed("`Builder::parameter_group`", &group.pattern)?, group.clone()))
        };
        Ok(ParameterGroups {
            groups: groups.iter().map(group).collect::<Result<_, _>>()?,
            frozen: frozen.iter().map(|text| parsed("`Builder::freeze`", text)).collect::<Result<_, _>>()?,
        })
    }

    /// Whether this parameter is not trained.
    pub fn freezes(&self, name: &str) -> bool {
        self.frozen.iter().any(|pattern| matches(pattern, name))
    }

    /// Whether any parameter is frozen.
    pub fn any_frozen(&self) -> bool {
        !self.frozen.is_empty()
    }

    /// The settings of a parameter. Where several groups match it, each setting is that of the last one that has it.
    pub fn settings(&self, name: &str) -> ParameterSettings {
        let matching =
            || self.groups.iter().rev().filter(|(pattern, _)| matches(pattern, name)).map(|(_, group)| group);
        ParameterSettings {
            rate_factor: matching().find_map(|group| group.rate_factor).unwrap_or(1.0),
            weight_decay: matching().find_map(|group| group.weight_decay),
        }
    }

    /// Checks that each pattern matches a parameter, and that one is left to train. `own_optimizer` says whether the model
    /// has its own.
    pub fn check(&self, parameters: &[String], own_optimizer: bool) -> Result<(), ParameterGroupError> {
        let groups = self.groups.iter().map(|(pattern, _)| ("`Builder::parameter_group`", pattern));
        let frozen = self.frozen.iter().map(|pattern| ("`Builder::freeze`", pattern));
        for (option, pattern) in groups.chain(frozen) {
            if !parameters.iter().any(|name| matches(pattern, name)) {
                let closest = closest(pattern.as_str(), parameters);
                return Err(ParameterGroupError::NoMatch { option, pattern: pattern.as_str().to_owned(), closest });
            }
        }
        if self.any_frozen() && parameters.iter().all(|name| self.freezes(name)) {
            let patterns: Vec<String> = self.frozen.iter().map(|pattern| format!("`{pattern}`")).collect();
            let patterns = patterns.join(", ");
            return Err(ParameterGroupError::AllFrozen { patterns, parameters: parameters.len() });
        }
        match self.groups.iter().find(|(_, group)| own_optimizer && group.weight_decay.is_some()) {
            Some((_, group)) => Err(ParameterGroupError::OwnOptimizer { pattern: group.pattern.clone() }),
            None => Ok(()),
        }
    }
}

fn parsed(option: &'static str, text: &str) -> Result<Pattern, ParameterGroupError> {
    Pattern::new(text).map_err(|PatternError { msg, .. }| ParameterGroupError::Pattern {
        option,
        pattern: text.to_owned(),
        why: msg.to_owned(),
    })
}

/// Names are not paths: `*` matches any character, also a slash or a leading dot.
fn matches(pattern: &Pattern, name: &str) -> bool {
    let options =
        MatchOptions { case_sensitive: true, require_literal_separator: false, require_literal_leading_dot: false };
    pattern.matches_with(name, options)
}

/// The parameters whose names are most like a pattern.
fn closest(pattern: &str, parameters: &[String]) -> String {
    let likeness = |name: &str| strsim::jaro_winkler(pattern, name);
    let mut names: Vec<&String> = parameters.iter().collect();
    names.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
    let names: Vec<String> = names.into_iter().take(SUGGESTIONS).map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        ["features.0.weight", "features.0.bias", "features.1.weight", "classifier.weight", "classifier.bias"]
            .map(str::to_owned)
            .to_vec()
    }

    #[test]
    fn the_last_group_that_has_a_setting_decides_it() {
        let groups = [
            ParameterGroup::new("features.*").rate_factor(0.1).weight_decay(0.5),
            ParameterGroup::new("*.bias").weight_decay(0.0),
            ParameterGroup::new("features.?.weight").rate_factor(0.2),
        ];
        let groups = ParameterGroups::new(&groups, &[]).unwrap();
        groups.check(&names(), false).unwrap();
        let of = |name| {
            let ParameterSettings { rate_factor, weight_decay } = groups.settings(name);
            (rate_factor, weight_decay)
        };
        assert_eq!(of("features.0.weight"), (0.2, Some(0.5)));
        assert_eq!(of("features.0.bias"), (0.1, Some(0.0)));
        assert_eq!(of("classifier.bias"), (1.0, Some(0.0)));
        assert_eq!(of("classifier.weight"), (1.0, None));
    }

    #[test]
    fn a_pattern_matches_the_whole_name_and_one_without_a_match_suggests_names() {
        let error = |frozen: &[&str]| {
            let frozen: Vec<String> = frozen.iter().map(|&text| text.to_owned()).collect();
            ParameterGroups::new(&[], &frozen)?.check(&names(), false)
        };
        assert_eq!(error(&["features.*"]), Ok(()));
        let said = error(&["feature.*"]).unwrap_err().to_string();
        assert!(said.contains("`Builder::freeze`: no parameter matches `feature.*`"), "{said}");
        assert!(said.contains("`features.0.bias`"), "{said}");
        assert!(matches!(error(&["features.0"]), Err(ParameterGroupError::NoMatch { .. })));
        assert!(matches!(error(&["[features"]), Err(ParameterGroupError::Pattern { .. })));
        let said = error(&["features.*", "*.weight", "*.bias"]).unwrap_err().to_string();
        assert!(said.contains("freezes all 5 parameters"), "{said}");
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for group in [ParameterGroup::new("*").rate_factor(-1.0), ParameterGroup::new("*").weight_decay(f64::NAN)] {
            assert!(matches!(ParameterGroups::new(&[group], &[]), Err(ParameterGroupError::Range { .. })));
        }
        let decay = ParameterGroups::new(&[ParameterGroup::new("*").weight_decay(0.1)], &[]).unwrap();
        assert_eq!(decay.check(&names(), false), Ok(()));
        assert!(matches!(decay.check(&names(), true), Err(ParameterGroupError::OwnOptimizer { .. })));
    }
}
