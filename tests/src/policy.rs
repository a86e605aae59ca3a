//! Texts of policies.

/// A rule for requests of one path, which is `/ID`. `more` are its other lines.
pub fn rule_of_path(id: &str, more: &str) -> String {
    format!(
        "[[endpoints]]\nname = \"{id}\"\nmatch = [\"/{id}\"]\n[[rules]]\nid = \"{id}\"\nendpoint = \"{id}\"\n{more}\n"
    )
}
