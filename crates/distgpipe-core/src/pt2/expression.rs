//! Sizes that depend on the batch. PyTorch writes them as SymPy's `srepr`: `Mul(Integer(2), Symbol('s77', positive=True))`.
//! Only sums and products that are linear in one symbol are sizes here.

use super::graph::Size;

/// The deepest nesting that is read.
const DEPTH_MAX: usize = 32;

/// A size, and the symbol it depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expression {
    /// The symbol's factor and the constant.
    pub factor: i64,
    pub plus: i64,
    /// The symbol; empty if there is none.
    pub symbol: String,
}

impl Expression {
    fn constant(plus: i64) -> Self {
        Expression { factor: 0, plus, symbol: String::new() }
    }

    /// The size, if the expression depends on no other symbol than `batch`.
    pub fn size(&self, batch: &str) -> Option<Size> {
        match self.factor {
            0 => Some(Size::Fixed(self.plus)),
            factor if self.symbol == batch => Some(Size::Rows(factor, self.plus)),
            _ => None,
        }
    }

    fn symbol_with(&self, other: &Self) -> Option<String> {
        match (&self.symbol[..], &other.symbol[..]) {
            (a, b) if a == b || b.is_empty() => Some(a.to_owned()),
            ("", b) => Some(b.to_owned()),
            _ => None,
        }
    }

    fn add(&self, other: &Self) -> Option<Self> {
        let (factor, plus) = (self.factor.checked_add(other.factor)?, self.plus.checked_add(other.plus)?);
        Some(Expression { factor, plus, symbol: self.symbol_with(other)? })
    }

    fn multiply(&self, other: &Self) -> Option<Self> {
        if self.factor != 0 && other.factor != 0 {
            return None;
        }
        let factor = self.factor.checked_mul(other.plus)?.checked_add(other.factor.checked_mul(self.plus)?)?;
        Some(Expression { factor, plus: self.plus.checked_mul(other.plus)?, symbol: self.symbol_with(other)? })
    }
}

/// Reads an expression; `None` if it is anything else than a linear one.
pub fn parse(text: &str) -> Option<Expression> {
    let mut rest = text;
    let expression = term(&mut rest, 0)?;
    rest.is_empty().then_some(expression)
}

fn term(rest: &mut &str, depth: usize) -> Option<Expression> {
    if depth > DEPTH_MAX {
        return None;
    }
    let (head, inside) = rest.split_once('(')?;
    *rest = inside;
    match head.trim() {
        "Integer" => {
            let (digits, after) = inside.split_once(')')?;
            *rest = after;
            Some(Expression::constant(digits.trim().parse().ok()?))
        }
        "Symbol" => {
            let (arguments, after) = inside.split_once(')')?;
            *rest = after;
            let name = arguments.strip_prefix('\'')?.split_once('\'')?.0;
            let plain =
                !name.is_empty() && name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            plain.then(|| Expression { factor: 1, plus: 0, symbol: name.to_owned() })
        }
        "Add" => operands(rest, depth, Expression::constant(0), Expression::add),
        "Mul" => operands(rest, depth, Expression::constant(1), Expression::multiply),
        _ => None,
    }
}

fn operands(
    rest: &mut &str,
    depth: usize,
    start: Expression,
    combine: impl Fn(&Expression, &Expression) -> Option<Expression>,
) -> Option<Expression> {
    let mut result = start;
    loop {
        *rest = rest.trim_start();
        result = combine(&result, &term(rest, depth + 1)?)?;
        *rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(',') {
            *rest = after;
        } else {
            *rest = rest.strip_prefix(')')?;
            return Some(result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size(text: &str) -> Option<Size> {
        parse(text)?.size("s77")
    }

    #[test]
    fn linear_expressions_are_sizes_and_others_are_not() {
        let symbol = "Symbol('s77', positive=True, integer=True)";
        assert_eq!(size(symbol), Some(Size::BATCH));
        assert_eq!(size(&format!("Mul(Integer(17), {symbol})")), Some(Size::Rows(17, 0)));
        assert_eq!(size(&format!("Add(Mul(Integer(2), {symbol}), Integer(-1))")), Some(Size::Rows(2, -1)));
        assert_eq!(size("Integer(5)"), Some(Size::Fixed(5)));
        assert_eq!(size(&format!("Mul({symbol}, {symbol})")), None);
        assert_eq!(size("Symbol('s5', integer=True)"), None, "another symbol");
        assert_eq!(size(&format!("FloorDiv({symbol}, Integer(2))")), None);
        assert_eq!(size(&format!("Mul(Integer({}), Integer(2))", i64::MAX)), None);
        let deep = format!("{}Integer(1){}", "Add(".repeat(100_000), ")".repeat(100_000));
        assert_eq!(size(&deep), None);
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in "[A-Za-z0-9()',= -]{0,60}") {
            let _ = parse(&text);
        }
    }
}
