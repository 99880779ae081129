"""The conformance kit of infer over this plugin."""

import infer_entropy

from infer.testing.conformance import PluginTests


class TestEntropy(PluginTests):
    plugin = infer_entropy
