"""The conformance kit of infer over this plugin."""

import infer_slow

from infer.testing.conformance import PluginTests


class TestSlow(PluginTests):
    plugin = infer_slow
