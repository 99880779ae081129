"""The output formats of models, one file each: a table, its transcripts and the hook that declares it."""
