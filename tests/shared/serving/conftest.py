"""Streams run on both event loops: asyncio's own reads and writes differently from uvloop."""

import asyncio

import uvloop


def pytest_asyncio_loop_factories(config, item):
    own = {"asyncio": asyncio.new_event_loop}
    return {**own, "uvloop": uvloop.new_event_loop} if "test_stream" in item.path.name else own
