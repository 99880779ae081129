"""The open format `generation_artifact_v2`: field table, streaming writer, range reader. Described in docs/artifact_v2.md."""
