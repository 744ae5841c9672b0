// Calls the agents of docs/a2a.md with the official JavaScript client of A2A 1.0, as it is, over each binding, and
// prints what it counts.
//
//     node scripts/run_js_client.mjs FOLDER URL TOKEN
//
// FOLDER has the client: `npm install @a2a-js/sdk @grpc/grpc-js @bufbuild/protobuf`. URL is a daemon that serves the two
// agents of docs/a2a.md over HTTP and gRPC (`grpc.enabled`), TOKEN its operator's.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const [folder, base, token] = process.argv.slice(2);
const load = createRequire(resolve(folder, "package.json"));
const { ClientFactory, DefaultAgentCardResolver, JsonRpcTransportFactory, RestTransportFactory } = load("@a2a-js/sdk/client");
const { GrpcTransportFactory } = load("@a2a-js/sdk/client/grpc");

const LIMIT_MS = 30_000;
const INPUT_REQUIRED = 6;
const CANCELED = 5;
const COMPLETED = 3;
const LONG = "word ".repeat(100);

const fetchImpl = (url, request = {}) => {
  const headers = new Headers(request.headers);
  headers.set("authorization", `Bearer ${token}`);
  return fetch(url, { ...request, headers });
};
const signedIn = { serviceParameters: { authorization: `Bearer ${token}` } };
const taskIn = (answer) => answer.payload?.value ?? answer;

function request(text, { returnImmediately = false, ...about } = {}) {
  const part = { content: { $case: "text", value: text }, filename: "", mediaType: "" };
  const message = { messageId: randomUUID(), contextId: "", taskId: "", role: 1, parts: [part], extensions: [], referenceTaskIds: [], ...about };
  return { tenant: "", message, configuration: { acceptedOutputModes: [], returnImmediately } };
}

async function refused(call, name) {
  await assert.rejects(call, (error) => error.constructor.name.includes(name));
}

const CASES = {
  send: async ({ shout }) => {
    const task = taskIn(await shout.sendMessage(request("good day"), signedIn));
    assert.equal(task.status.state, COMPLETED);
    assert.equal(task.artifacts.length, 1);
  },
  stream: async ({ shout }) => {
    const kinds = [];
    for await (const event of shout.sendMessageStream(request("one two"), signedIn)) kinds.push(event.payload.$case);
    assert.equal(kinds[0], "task");
    assert.ok(kinds.includes("artifactUpdate"));
    assert.equal(kinds.at(-1), "statusUpdate");
  },
  "ask and answer": async ({ table }) => {
    const asked = taskIn(await table.sendMessage(request("tonight"), signedIn));
    assert.equal(asked.status.state, INPUT_REQUIRED);
    const answer = request("four", { taskId: asked.id, contextId: asked.contextId });
    assert.equal(taskIn(await table.sendMessage(answer, signedIn)).status.state, COMPLETED);
  },
  "get, list, subscribe, cancel": async ({ shout }) => {
    const { id, contextId } = taskIn(await shout.sendMessage(request(LONG, { returnImmediately: true }), signedIn));
    assert.equal((await shout.getTask({ tenant: "", id }, signedIn)).id, id);
    const { tasks } = await shout.listTasks({ tenant: "", contextId, status: 0, pageToken: "" }, signedIn);
    assert.equal(tasks.length, 1);
    const events = shout.resubscribeTask({ tenant: "", id }, signedIn);
    assert.equal((await events.next()).value.payload.$case, "task");
    assert.equal((await shout.cancelTask({ tenant: "", id }, signedIn)).status.state, CANCELED);
    let last = null;
    for await (const event of events) last = event.payload.$case;
    assert.equal(last, "statusUpdate");
  },
  "an unknown task": ({ shout }) => refused(() => shout.getTask({ tenant: "", id: randomUUID() }, signedIn), "TaskNotFound"),
  "a task that has ended": async ({ shout }) => {
    const { id } = taskIn(await shout.sendMessage(request("once"), signedIn));
    await refused(() => shout.sendMessage(request("again", { taskId: id }), signedIn), "UnsupportedOperation");
  },
};
const BINDINGS = {
  JSONRPC: new JsonRpcTransportFactory({ fetchImpl }),
  "HTTP+JSON": new RestTransportFactory({ fetchImpl }),
  GRPC: new GrpcTransportFactory(),
};

let passed = 0;
for (const [binding, transport] of Object.entries(BINDINGS)) {
  const cardResolver = new DefaultAgentCardResolver({ fetchImpl });
  const factory = new ClientFactory({ transports: [transport], preferredTransports: [binding], cardResolver });
  const at = (agent) => factory.createFromUrl(`${base}/v1/a2a/agents/${agent}/`);
  const clients = { shout: await at("shout"), table: await at("table") };
  for (const [name, run] of Object.entries(CASES)) {
    const late = new Promise((_, fail) => setTimeout(() => fail(new Error("it took too long")), LIMIT_MS).unref());
    try {
      await Promise.race([run(clients), late]);
      passed += 1;
    } catch (error) {
      console.log(`${binding}, ${name}: ${error.message}`);
    }
  }
}
const cases = Object.keys(BINDINGS).length * Object.keys(CASES).length;
console.log(`@a2a-js/sdk ${load("./node_modules/@a2a-js/sdk/package.json").version}: ${passed} of ${cases} passed`);
process.exit(passed === cases ? 0 : 1);
