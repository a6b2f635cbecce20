import json

from openai import AsyncOpenAI

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"type": "function", "name": "price", "description": "What an item costs.", "parameters": ITEM}


async def run(task, session):
    items = [{"role": "user", "content": task["question"]}]
    url = session.openai_base_url("clerk")
    async with AsyncOpenAI(base_url=url, api_key=session.api_key) as client:
        while True:
            reply = await client.responses.create(model="clerk", input=items, tools=[PRICE])
            items += reply.output
            calls = [item for item in reply.output if item.type == "function_call"]
            for call in calls:
                price = task["prices"][json.loads(call.arguments)["item"]]
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": price})
            if not calls:
                return float(task["wanted"] in reply.output_text)
