//! First stage of reading a TOML file: values with their place, and which fields exist.
//!
//! A [`Table`] hands out its fields by name; what nobody asked for is an unknown field. Mistakes go to a list and reading
//! goes on, so that all of them are reported at once. Environment variables stand in for fields of the file.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
    ffi::OsString,
    fmt::Display,
    path::{Path, PathBuf},
    sync::Arc,
};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::error::{ConfigError, ConfigErrors, Origin};

/// What the message says of a field that the design names and this version does not have.
pub(crate) const LATER: &str = "is not available in this version";

/// Variables that stand in for fields: `LIMITER_<TABLE>_<FIELD>`.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<String, OsString>);

impl Environment {
    const PREFIX: &'static str = "LIMITER_";

    /// Of this process.
    pub fn of_process() -> Self {
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&OsString> {
        self.0.get(name)
    }
}

impl<N: Into<String>, V: Into<OsString>> FromIterator<(N, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(variables: I) -> Self {
        let variables = variables.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self(variables.filter(|(name, _): &(String, _)| name.starts_with(Self::PREFIX)).collect())
    }
}

/// What all values of a file share.
#[derive(Debug)]
pub(crate) struct Context {
    path: Arc<Path>,
    /// Offsets at which lines begin.
    line_starts: Vec<usize>,
    environment: RefCell<BTreeMap<String, OsString>>,
    errors: RefCell<ConfigErrors>,
}

impl Context {
    pub(crate) fn new(path: &Path, text: &str, environment: Environment) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        Self {
            path: PathBuf::from(path).into(),
            line_starts: std::iter::once(0).chain(breaks).collect(),
            environment: RefCell::new(environment.0),
            errors: RefCell::default(),
        }
    }

    /// The document, or its syntax errors, which are then all that is reported: what else would be found in a file that
    /// is not TOML would mislead.
    pub(crate) fn parse<'d>(&self, text: &'d str) -> Result<Spanned<DeTable<'d>>, ConfigErrors> {
        let (document, mistakes) = DeTable::parse_recoverable(text);
        if mistakes.is_empty() {
            return Ok(document);
        }
        let mut errors = ConfigErrors::new();
        let mut lines = HashSet::new();
        for mistake in mistakes {
            let line = mistake.span().map(|span| self.line(span.start));
            // One mistake makes the parser stumble several times over the same line.
            if !lines.insert(line) {
                continue;
            }
            let key = line.map(|line| key_on_line(text, line)).unwrap_or_default();
            let message = mistake.message().lines().collect::<Vec<_>>().join(", ");
            let origin = Origin::File { path: self.path.clone(), line };
            errors.push(ConfigError { origin, key, message, no_permission: false });
        }
        Err(errors)
    }

    fn line(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= offset)
    }

    fn origin_at(&self, offset: usize) -> Origin {
        Origin::File { path: self.path.clone(), line: Some(self.line(offset)) }
    }

    fn push(&self, origin: Origin, key: &str, message: impl Display) {
        let (key, message) = (key.to_owned(), message.to_string());
        self.errors.borrow_mut().push(ConfigError { origin, key, message, no_permission: false });
    }

    /// Reports variables that name a table and no field of it.
    pub(crate) fn finish_environment(&self, tables: &[&str]) {
        for name in self.environment.take().into_keys() {
            let of_table = |table: &&str| name[Environment::PREFIX.len()..].starts_with(&format!("{}_", upper(table)));
            if tables.iter().any(of_table) {
                self.push(Origin::Variable(name), "", "names no field of the configuration");
            }
        }
    }

    pub(crate) fn take_errors(&self) -> ConfigErrors {
        self.errors.take()
    }
}

/// The key that a line with a syntax error is about, as far as the text tells.
fn key_on_line(text: &str, line: usize) -> String {
    let lines: Vec<&str> = text.lines().take(line).map(str::trim).collect();
    let header = |line: &&str| line.starts_with('[').then(|| line.trim_matches(['[', ']', ' ']).to_owned());
    let last = lines.last().copied().unwrap_or_default();
    if let Some(header) = header(&last) {
        return header;
    }
    let table = lines.iter().rev().find_map(header);
    let name = last.split_once('=').map_or(last, |(name, _)| name).trim();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "._-\"'".contains(c));
    let parts = table.into_iter().chain(is_name.then(|| name.to_owned()));
    parts.collect::<Vec<_>>().join(".")
}

fn upper(name: &str) -> String {
    name.to_ascii_uppercase()
}

/// A place in a file that a mistake can be about.
#[derive(Clone, Debug)]
pub(crate) struct Place<'d> {
    context: &'d Context,
    origin: Origin,
    key: String,
}

impl Place<'_> {
    pub(crate) fn origin(&self) -> Origin {
        self.origin.clone()
    }

    pub(crate) fn error(&self, message: impl Display) {
        self.context.push(self.origin.clone(), &self.key, message);
    }

    /// That something which this value names could not be read.
    pub(crate) fn io_error(&self, operation: impl Display, error: &std::io::Error) {
        let no_permission = error.kind() == std::io::ErrorKind::PermissionDenied;
        let (origin, key, message) = (self.origin.clone(), self.key.clone(), format!("{operation}: {error}"));
        self.context.errors.borrow_mut().push(ConfigError { origin, key, message, no_permission });
    }

    /// A mistake about a field of this table.
    pub(crate) fn error_in(&self, field: &str, message: impl Display) {
        self.context.push(self.origin.clone(), &dotted(&self.key, field), message);
    }
}

fn dotted(table: &str, field: &str) -> String {
    if table.is_empty() { field.to_owned() } else { format!("{table}.{field}") }
}

/// A table whose fields are handed out by name. A table that the file lacks has no fields but those of the environment.
#[derive(Debug)]
pub(crate) struct Table<'d> {
    place: Place<'d>,
    fields: Option<&'d DeTable<'d>>,
    /// Begin of the names of the variables that stand in for fields; `None` where the environment does not reach.
    variables: Option<String>,
    known: Vec<&'static str>,
}

impl<'d> Table<'d> {
    pub(crate) fn root(context: &'d Context, document: &'d Spanned<DeTable<'d>>) -> Self {
        let origin = Origin::File { path: context.path.clone(), line: None };
        let place = Place { context, origin, key: String::new() };
        Self { place, fields: Some(document.get_ref()), variables: Some(Environment::PREFIX.into()), known: Vec::new() }
    }

    pub(crate) fn place(&self) -> Place<'d> {
        self.place.clone()
    }

    fn place_of(&self, field: &str, offset: usize) -> Place<'d> {
        let context = self.place.context;
        Place { context, origin: context.origin_at(offset), key: dotted(&self.place.key, field) }
    }

    pub(crate) fn take(&mut self, field: &'static str) -> Option<Value<'d>> {
        self.known.push(field);
        let context = self.place.context;
        if let Some(variable) = self.variables.as_ref().map(|prefix| prefix.clone() + &upper(field)) {
            let text = context.environment.borrow_mut().remove(&variable);
            if let Some(text) = text {
                let place = Place { context, origin: Origin::Variable(variable), key: dotted(&self.place.key, field) };
                return match text.into_string() {
                    Ok(text) => Some(Value { place, kind: Kind::Text(text) }),
                    Err(_) => {
                        place.error("is not UTF-8");
                        None
                    }
                };
            }
        }
        let (name, value) = self.fields?.get_key_value(field)?;
        Some(Value { place: self.place_of(field, name.span().start), kind: Kind::Toml(value.get_ref()) })
    }

    /// A table in this one.
    pub(crate) fn table(&mut self, field: &'static str) -> Self {
        self.known.push(field);
        let variables = self.variables.as_ref().map(|prefix| format!("{prefix}{}_", upper(field)));
        let absent = |place| Self { place, fields: None, variables: variables.clone(), known: Vec::new() };
        let Some((name, value)) = self.fields.and_then(|fields| fields.get_key_value(field)) else {
            let key = dotted(&self.place.key, field);
            return absent(Place { context: self.place.context, origin: self.place.origin.clone(), key });
        };
        let place = self.place_of(field, name.span().start);
        let Some(fields) = value.get_ref().as_table() else {
            place.error(format_args!("expected a table, found {}", name_of(value.get_ref())));
            return absent(place);
        };
        Self { place, fields: Some(fields), variables, known: Vec::new() }
    }

    /// Refuses a field that later versions have.
    pub(crate) fn later(&mut self, field: &'static str) {
        let is_table = self.fields.and_then(|fields| fields.get(field)).is_some_and(|value| value.get_ref().is_table());
        if is_table {
            self.known.push(field);
            let at =
                self.fields.and_then(|fields| fields.get_key_value(field)).map_or(0, |(name, _)| name.span().start);
            self.place_of(field, at).error(LATER);
        } else if let Some(value) = self.take(field) {
            value.place.error(LATER);
        }
    }

    /// The fields, whatever they are called: for tables whose keys are names that the operator chose.
    pub(crate) fn named(self) -> Vec<(&'d str, Value<'d>)> {
        let fields = self.fields.into_iter().flatten();
        let mut fields: Vec<_> = fields.collect();
        fields.sort_by_key(|(name, _)| name.span().start);
        let value = |name: &'d Spanned<_>, value: &'d Spanned<DeValue<'d>>| {
            let name: &'d Spanned<std::borrow::Cow<'d, str>> = name;
            let place = self.place_of(name.get_ref(), name.span().start);
            (&**name.get_ref(), Value { place, kind: Kind::Toml(value.get_ref()) })
        };
        fields.into_iter().map(|(name, field)| value(name, field)).collect()
    }

    /// Reports every field that nobody asked for.
    pub(crate) fn finish(self) {
        for (name, _) in self.fields.into_iter().flatten() {
            let field: &str = name.get_ref();
            if !self.known.contains(&field) {
                let message = match nearest(field, &self.known) {
                    Some(near) => format!("unknown field: did you mean \"{near}\"?"),
                    None => format!("unknown field: known are {}", self.known.join(", ")),
                };
                self.place_of(field, name.span().start).error(message);
            }
        }
    }
}

/// The name that was probably meant.
pub(crate) fn nearest<'n>(name: &str, known: &[&'n str]) -> Option<&'n str> {
    let distances = known.iter().map(|known| (edit_distance(name, known), *known));
    let (distance, known) = distances.min()?;
    (distance <= 2 && distance < known.len()).then_some(known)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().take(64).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn name_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a decimal number",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// One value and its place.
#[derive(Clone, Debug)]
pub(crate) struct Value<'d> {
    place: Place<'d>,
    kind: Kind<'d>,
}

#[derive(Clone, Debug)]
enum Kind<'d> {
    Toml(&'d DeValue<'d>),
    /// From the environment, where everything is text.
    Text(String),
}

impl<'d> Value<'d> {
    pub(crate) const fn place(&self) -> &Place<'d> {
        &self.place
    }

    pub(crate) fn error(&self, message: impl Display) {
        self.place.error(message);
    }

    fn expected(&self, expected: &str) {
        let found = match &self.kind {
            Kind::Toml(value) => name_of(value),
            Kind::Text(_) => "text",
        };
        self.error(format_args!("expected {expected}, found {found}"));
    }

    /// The text, if it is one; no mistake otherwise.
    pub(crate) fn as_str(&self) -> Option<&str> {
        match &self.kind {
            Kind::Toml(value) => value.as_str(),
            Kind::Text(text) => Some(text),
        }
    }

    /// The digits of a number as written, if it is one; no mistake otherwise. Underscores are gone.
    pub(crate) fn as_number(&self) -> Option<&str> {
        match &self.kind {
            Kind::Toml(DeValue::Float(float)) => Some(float.as_str()),
            Kind::Toml(DeValue::Integer(integer)) if integer.radix() == 10 => Some(integer.as_str()),
            Kind::Toml(_) | Kind::Text(_) => None,
        }
    }

    pub(crate) fn is_date(&self) -> bool {
        matches!(self.kind, Kind::Toml(DeValue::Datetime(_)))
    }

    /// A date as it is written, if it is one; no mistake otherwise.
    pub(crate) fn as_date(&self) -> Option<String> {
        match &self.kind {
            Kind::Toml(DeValue::Datetime(date)) => Some(date.to_string()),
            Kind::Toml(_) | Kind::Text(_) => None,
        }
    }

    pub(crate) fn is_integer(&self) -> bool {
        matches!(self.kind, Kind::Toml(DeValue::Integer(_)))
    }

    /// `expected` says what is wanted when the value is no text: "a duration such as …".
    pub(crate) fn text(&self, expected: &str) -> Option<&str> {
        let text = self.as_str();
        if text.is_none() {
            self.expected(expected);
        }
        text
    }

    /// Text that `parse` understands.
    pub(crate) fn parsed<T, E: Display>(&self, expected: &str, parse: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
        parse(self.text(expected)?).map_err(|error| self.error(error)).ok()
    }

    /// One of a few words.
    pub(crate) fn one_of<T: Copy>(&self, words: &[(&str, T)]) -> Option<T> {
        let text = self.text("a word")?;
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        if found.is_none() {
            let words: Vec<_> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            self.error(format_args!("\"{text}\" is not one of {}", words.join(", ")));
        }
        found
    }

    pub(crate) fn boolean(&self) -> Option<bool> {
        let value = match &self.kind {
            Kind::Toml(value) => value.as_bool(),
            Kind::Text(text) => text.parse().ok(),
        };
        if value.is_none() {
            self.expected("true or false");
        }
        value
    }

    /// A whole number that is not negative.
    pub(crate) fn unsigned(&self) -> Option<u64> {
        let number = match &self.kind {
            Kind::Toml(value) => value.as_integer().map(|integer| (integer.as_str(), integer.radix())),
            Kind::Text(text) => Some((text.as_str(), 10)),
        };
        let Some((digits, radix)) = number else {
            self.expected("a whole number");
            return None;
        };
        match i128::from_str_radix(digits, radix) {
            Ok(number) if number < 0 => self.error(format_args!("{digits} is negative")),
            Ok(number) => match u64::try_from(number) {
                Ok(number) => return Some(number),
                Err(_) => self.error(format_args!("{digits} is too large")),
            },
            Err(error) if *error.kind() == std::num::IntErrorKind::PosOverflow => {
                self.error(format_args!("{digits} is too large"));
            }
            Err(_) => self.expected("a whole number"),
        }
        None
    }

    /// A whole number within bounds.
    pub(crate) fn within<T: TryFrom<u64>>(&self, bounds: std::ops::RangeInclusive<u64>) -> Option<T> {
        let number = self.unsigned()?;
        if bounds.contains(&number)
            && let Ok(number) = T::try_from(number)
        {
            return Some(number);
        }
        self.error(format_args!("{number} is outside {} to {}", bounds.start(), bounds.end()));
        None
    }

    /// The elements of a list; a variable holds them with commas between.
    pub(crate) fn list(&self) -> Option<Vec<Self>> {
        self.list_or("a list")
    }

    /// As [`Self::list`], where something else would do as well: `expected` says what is wanted.
    pub(crate) fn list_or(&self, expected: &str) -> Option<Vec<Self>> {
        let element = |index: usize, kind| {
            let mut place = self.place.clone();
            place.key = format!("{}[{index}]", place.key);
            Self { place, kind }
        };
        match &self.kind {
            Kind::Toml(DeValue::Array(array)) => {
                let elements = array.iter().enumerate().map(|(index, value)| {
                    let mut element = element(index, Kind::Toml(value.get_ref()));
                    element.place.origin = self.place.context.origin_at(value.span().start);
                    element
                });
                Some(elements.collect())
            }
            Kind::Toml(_) => {
                self.expected(expected);
                None
            }
            Kind::Text(text) => {
                let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
                Some(parts.enumerate().map(|(index, part)| element(index, Kind::Text(part.into()))).collect())
            }
        }
    }

    /// The tables of a list `[[…]]`.
    pub(crate) fn tables(&self) -> Option<Vec<Table<'d>>> {
        if let Kind::Toml(DeValue::Table(_)) = self.kind {
            self.error(format_args!("there can be several: write [[{}]]", self.place.key));
            return None;
        }
        Some(self.list()?.iter().filter_map(Self::table).collect())
    }

    /// The fields of a table.
    pub(crate) fn table(&self) -> Option<Table<'d>> {
        match &self.kind {
            Kind::Toml(DeValue::Table(fields)) => {
                Some(Table { place: self.place.clone(), fields: Some(fields), variables: None, known: Vec::new() })
            }
            Kind::Toml(_) | Kind::Text(_) => {
                self.expected("a table");
                None
            }
        }
    }
}

/// Declares the fields of a table: those that are read, the tables within, and those that later versions have. `in place`
/// keeps where the table is, for mistakes about what it lacks.
macro_rules! raw_table {
    ($(#[$doc:meta])* $name:ident $(in $place:ident)? {
        $($field:ident),* $(,)?
        $(; tables $($table:ident : $kind:ident),* $(,)?)?
        $(; later $($later:ident),* $(,)?)?
    }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $name<'d> {
            $(pub(crate) $place: $crate::config::Place<'d>,)?
            $(pub(crate) $field: Option<$crate::config::Value<'d>>,)*
            $($(pub(crate) $table: $kind<'d>,)*)?
        }

        impl<'d> $name<'d> {
            pub(crate) fn read(mut table: $crate::config::Table<'d>) -> Self {
                let raw = Self {
                    $($place: table.place(),)?
                    $($field: table.take(stringify!($field).trim_start_matches("r#")),)*
                    $($($table: $kind::read(table.table(stringify!($table))),)*)?
                };
                $($(table.later(stringify!($later));)*)?
                table.finish();
                raw
            }
        }
    };
}
pub(crate) use raw_table;
