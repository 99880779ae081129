"""The conformance kit of infer over this plugin."""

import infer_int8

from infer.testing.conformance import PluginTests


class TestInt8(PluginTests):
    plugin = infer_int8
