"""The conformance kit of infer over this plugin."""

import infer_slash

from infer.testing.conformance import PluginTests


class TestSlash(PluginTests):
    plugin = infer_slash
