"""A small MCP server for tests, as a script: standard library only, JSON-RPC 2.0, one message a line."""

import json
import os
import sys
import time

TOOLS = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
    {"name": "fail", "description": "Never works.", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "hang", "description": "Never ends.", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "die", "description": "Ends the server.", "inputSchema": {"type": "object", "properties": {}}},
    {"name": "picture", "description": "Gives an image.", "inputSchema": {"type": "object", "properties": {}}},
]


def send(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def call(number, name, arguments):
    if name == "add":
        result = {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    elif name == "fail":
        result = {"content": [{"type": "text", "text": "it is broken"}], "isError": True}
    elif name == "picture":
        result = {
            "content": [{"type": "text", "text": "look:"}, {"type": "image", "data": "", "mimeType": "image/png"}]
        }
    elif name == "hang":
        return
    elif name == "die":
        print("goodbye", file=sys.stderr, flush=True)
        time.sleep(0.1)
        os._exit(3)
    else:
        send({"id": number, "error": {"code": -32602, "message": f"Unknown tool: {name}"}})
        return
    send({"id": number, "result": result})


def main():
    print("listening", flush=True)  # no JSON: a client has to live with it
    initialized = False
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        if method == "initialize":
            assert message["params"]["protocolVersion"] and message["params"]["clientInfo"]["name"] == "slime"
            send({"id": "ping-1", "method": "ping"})
            send({"id": number, "result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}})
        elif method == "notifications/initialized":
            initialized = True
        elif message.get("id") == "ping-1":
            assert message["result"] == {}
        elif method == "tools/list":
            assert initialized
            second = (message.get("params") or {}).get("cursor") == "second"
            page = {"tools": TOOLS[2:]} if second else {"tools": TOOLS[:2], "nextCursor": "second"}
            send({"id": number, "result": page})
        elif method == "tools/call":
            call(number, message["params"]["name"], message["params"]["arguments"])


main()
