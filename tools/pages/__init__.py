"""Parts of the documentation: hooks of MkDocs and the notebook's outputs."""
