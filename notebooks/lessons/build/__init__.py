"""What makes notebooks of `_src`: runs them, checks their claims, links terms to the glossary."""
