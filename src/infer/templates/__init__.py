"""Plugins to begin with: what `infer plugins new` writes, one module per kind, complete and in the name "my-name".

Read as text, never imported by the product; the conformance kits run over them as they stand. Owns nothing.
"""
