"""Tables of models and methods: rows are declared, and one runner makes their cells."""
