"""Who suggests the next program: edit templates, language models, people."""
