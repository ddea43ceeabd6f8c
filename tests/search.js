// Prints what the search of a built site finds: `node search.js SITE QUERY...`, one line of addresses for each query.
// It runs the site's own worker, with the messages that a browser sends to it.
const fs = require("fs"), path = require("path"), vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const [worker] = fs.readdirSync(workers).filter((name) => name.startsWith("search"));
let answer;
globalThis.self = { postMessage: (message) => answer(message) };
vm.runInThisContext(fs.readFileSync(path.join(workers, worker), "utf8"));
const send = (message) => new Promise((resolve) => { answer = resolve; self.onmessage({ data: message }); });

(async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search.json"), "utf8"));
  await send({ type: 0, data: index });
  for (const input of queries) {
    const { data } = await send({ type: 2, data: { input } });
    console.log(JSON.stringify(data.items.map((item) => index.items[item.id].location)));
  }
})();
