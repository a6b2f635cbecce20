import httpx
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


async def run(task, session):
    def price(item: str) -> str:
        """What an item costs."""
        return task["prices"][item]

    url = session.openai_base_url("clerk")
    # ChatOpenAI keeps a connection open for every URL it has seen, and each session has its own.
    async with httpx.AsyncClient() as http:
        model = ChatOpenAI(model="clerk", base_url=url, api_key=session.api_key, http_async_client=http)
        clerk = create_agent(model, tools=[price], system_prompt="Be brief.")
        state = await clerk.ainvoke({"messages": [{"role": "user", "content": task["question"]}]})
    return float(task["wanted"] in state["messages"][-1].content)
