import json

from openai import AsyncOpenAI

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"name": "price", "description": "What an item costs.", "parameters": ITEM}


async def run(task, session):
    messages = [{"role": "user", "content": task["question"]}]
    url = session.openai_base_url("clerk")
    async with AsyncOpenAI(base_url=url, api_key=session.api_key) as client:
        while True:
            reply = await client.chat.completions.create(
                model="clerk", messages=messages, tools=[{"type": "function", "function": PRICE}]
            )
            answer = reply.choices[0].message
            messages.append(answer)
            for call in answer.tool_calls or []:
                price = task["prices"][json.loads(call.function.arguments)["item"]]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": price})
            if not answer.tool_calls:
                return float(task["wanted"] in answer.content)
