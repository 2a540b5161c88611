"""The command line: one file a command, beside their options, inputs and output."""
