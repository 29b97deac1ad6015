"""The client that drains, and what the delivery experiment makes of it."""

import asyncio
import dataclasses
import json
import os
import resource
import sys
from pathlib import Path

import pytest
from processes import STRICT, started
from require import require
from scripted import scripted
from splits import every_split  # noqa: F401

import drainer
import http1
import websocket
from drainer import Drained, Drainer, Stream
