"""The conformance kit of infer over this plugin."""

import infer_gpt2

from infer.testing.conformance import PluginTests


class TestGPT2(PluginTests):
    plugin = infer_gpt2
