"""The schema of a tool, as chat templates and parsers of tool calls get it."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Move.",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "string", "description": "w"},
                    "steps": {"type": "integer", "description": "s"},
                    "fast": {"type": "boolean", "nullable": True, "description": "f"},
                    "path": {"type": "array", "items": {"type": "integer"}, "description": "p"},
                },
            },
        },
    }
]
