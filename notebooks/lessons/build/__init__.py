"""What makes notebooks of `_src`: runs them, links terms to the glossary."""
