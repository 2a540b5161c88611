"""The seven tasks: two perplexities and five multiple-choice tasks."""
