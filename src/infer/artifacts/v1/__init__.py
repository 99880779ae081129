"""The closed format `generation_artifact_v1`: limits, manifest, encoder, decoder. Pure; owns nothing."""
