"""`gpubpf mcp`: the tools for programs that talk the Model Context Protocol (MCP), such as assistants in editors."""
