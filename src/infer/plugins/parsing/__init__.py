"""One streaming machine for the output formats of models: a format is a table (`Dialect`), see docs/parsers.md.

Imported by the leaves in `infer.parsers`; owns nothing. No parser state lives outside a `TableParser`.
"""

from __future__ import annotations

from infer.plugins.parsing.calls_gemma import GemmaCalls
from infer.plugins.parsing.calls_header import HeaderCalls
from infer.plugins.parsing.calls_json import JsonCalls
from infer.plugins.parsing.calls_python import PythonCalls
from infer.plugins.parsing.calls_xml import XmlCalls
from infer.plugins.parsing.channels import ChannelParser, Channels
from infer.plugins.parsing.dialect import Dialect, Reasoning
from infer.plugins.parsing.machine import TableParser
from infer.plugins.parsing.transcripts import SAMPLE_TOOLS, called, cut, merge_events, said, thought

__all__ = [
    "SAMPLE_TOOLS",
    "ChannelParser",
    "Channels",
    "Dialect",
    "GemmaCalls",
    "HeaderCalls",
    "JsonCalls",
    "PythonCalls",
    "Reasoning",
    "TableParser",
    "XmlCalls",
    "called",
    "cut",
    "merge_events",
    "said",
    "thought",
]
