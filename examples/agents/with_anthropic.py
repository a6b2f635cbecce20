from anthropic import AsyncAnthropic

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"name": "price", "description": "What an item costs.", "input_schema": ITEM}


async def run(task, session):
    messages = [{"role": "user", "content": task["question"]}]
    url = session.anthropic_base_url("clerk")
    async with AsyncAnthropic(base_url=url, api_key=session.api_key) as client:
        while True:
            reply = await client.messages.create(
                model="clerk", messages=messages, tools=[PRICE], max_tokens=128
            )
            messages.append({"role": "assistant", "content": reply.content})
            results = []
            for block in reply.content:
                if block.type == "tool_use":
                    price = task["prices"][block.input["item"]]
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": price})
            messages.append({"role": "user", "content": results})
            if not results:
                return float(task["wanted"] in reply.content[0].text)
